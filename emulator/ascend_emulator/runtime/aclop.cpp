// aclop, the older way to launch an operator: only what torch_npu's C++ launches so by itself, which is Fill and a
// PadV3 of the last dimension (it aligns the buffers of collectives to 512 bytes). Any other operator fails by its name.
#include <cstring>
#include <string>
#include <vector>

#include "acl/acl.h"
#include "acl/acl_op.h"
#include "acl/acl_op_compiler.h"
#include "machine.h"

using namespace emulator;

struct aclTensorDesc { aclDataType type; size_t elements; int dimensions; size_t last; };
struct aclDataBuffer { void *data; size_t bytes; };
struct aclopAttr { int unused; };

extern "C" {
aclTensorDesc *aclCreateTensorDesc(aclDataType type, int dimensions, const int64_t *sizes, aclFormat) {
  size_t elements = 1;
  for (int i = 0; i < dimensions; i++) elements *= sizes[i];
  return new aclTensorDesc{type, elements, dimensions, dimensions ? (size_t)sizes[dimensions - 1] : 1};
}
void aclDestroyTensorDesc(const aclTensorDesc *desc) { delete desc; }
aclDataBuffer *aclCreateDataBuffer(void *data, size_t bytes) { return new aclDataBuffer{data, bytes}; }
aclError aclDestroyDataBuffer(const aclDataBuffer *buffer) { delete buffer; return ok; }
aclopAttr *aclopCreateAttr() { return new aclopAttr{0}; }
void aclopDestroyAttr(const aclopAttr *attr) { delete attr; }
aclError aclSetTensorPlaceMent(aclTensorDesc *, aclMemType) { return ok; }
aclError aclSetTensorFormat(aclTensorDesc *, aclFormat) { return ok; }
aclError aclSetTensorShape(aclTensorDesc *, int, const int64_t *) { return ok; }
aclError aclSetTensorConst(aclTensorDesc *, void *, size_t) { return ok; }
void aclSetTensorDescName(aclTensorDesc *, const char *) {}
aclDataType aclGetTensorDescType(const aclTensorDesc *desc) { return desc->type; }

aclError aclopCompileAndExecute(const char *name, int inputs, const aclTensorDesc *const input_descs[], const aclDataBuffer *const in[], int outputs, const aclTensorDesc *const output_descs[], aclDataBuffer *const out[], const aclopAttr *, aclopEngineType, aclopCompileType, const char *, aclrtStream handle) {
  Stream *stream = stream_of(handle);
  {
    Lock lock(machine().mutex);
    if (stream->capture) return refuse(lock, stream->capture, not_on_captured_stream, std::string("the aclop operator ") + name + " cannot be captured [R83]");
  }
  size_t width = output_descs[0]->elements ? out[0]->bytes / output_descs[0]->elements : 1;
  char *target = (char *)out[0]->data;
  auto value_of = [](const aclDataBuffer *buffer, size_t bytes) {  // launches copy what lies on the host
    const char *data = (const char *)buffer->data;
    std::string staged = is_device(data, 1) ? "" : std::string(data, bytes);
    return [=] { return staged.empty() ? std::string(data, bytes) : staged; };
  };
  if (std::string(name) == "Fill" && inputs == 2 && outputs == 1) {
    size_t count = output_descs[0]->elements;
    auto value = value_of(in[1], width);
    return submit_work(stream, [=] {
      std::string bytes = value();
      for (size_t i = 0; i < count; i++) memcpy(target + i * width, bytes.data(), width);
      return 0;
    });
  }
  if (std::string(name) == "PadV3" && inputs == 3 && outputs == 1 && input_descs[0]->dimensions) {
    auto amounts = value_of(in[1], in[1]->bytes)(), fill = value_of(in[2], width)();
    auto amount = [&](size_t i) { return input_descs[1]->type == ACL_INT64 ? ((const int64_t *)amounts.data())[i] : ((const int32_t *)amounts.data())[i]; };
    size_t pairs = input_descs[1]->elements / 2, row = input_descs[0]->last, wide = output_descs[0]->last;
    size_t rows = row ? input_descs[0]->elements / row : 0;
    for (size_t i = 0; i + 2 < 2 * pairs; i++)
      if (amount(i)) return fail(500099, "the emulated NPU pads the last dimension only");
    int64_t left = amount(2 * pairs - 2), right = amount(2 * pairs - 1);
    if (left < 0 || right < 0 || left + row + right != wide) return fail(500099, "the emulated NPU has no PadV3 that cuts");
    const char *source = (const char *)in[0]->data;
    return submit_work(stream, [=] {
      for (size_t i = 0; i < rows * wide; i++) memcpy(target + i * width, fill.data(), width);
      for (size_t r = 0; r < rows; r++) memcpy(target + (r * wide + left) * width, source + r * row * width, row * width);
      return 0;
    });
  }
  std::string shapes;
  for (int i = 0; i < inputs; i++) shapes += " " + std::to_string(input_descs[i]->dimensions) + "-d of type " + std::to_string(input_descs[i]->type);
  return fail(500099, std::string("the emulated NPU has no aclop operator ") + name + " with inputs" + shapes);
}
}
