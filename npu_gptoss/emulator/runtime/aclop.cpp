// aclop, the older way to launch an operator: only what torch_npu's C++ launches so by itself, which is Fill and a
// one-dimensional PadV3 (it aligns the buffers of collectives to 512 bytes). Any other operator fails by its name.
#include <cstring>
#include <string>
#include <vector>

#include "acl/acl.h"
#include "acl/acl_op.h"
#include "acl/acl_op_compiler.h"
#include "machine.h"

using namespace emulator;

struct aclTensorDesc { aclDataType type; size_t elements; int dimensions; };
struct aclDataBuffer { void *data; size_t bytes; };
struct aclopAttr { int unused; };

extern "C" {
aclTensorDesc *aclCreateTensorDesc(aclDataType type, int dimensions, const int64_t *sizes, aclFormat) {
  size_t elements = 1;
  for (int i = 0; i < dimensions; i++) elements *= sizes[i];
  return new aclTensorDesc{type, elements, dimensions};
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
  if (std::string(name) == "PadV3" && inputs == 3 && outputs == 1 && input_descs[0]->dimensions == 1) {
    auto amounts = value_of(in[1], in[1]->bytes)(), fill = value_of(in[2], width)();
    int64_t left = input_descs[1]->type == ACL_INT64 ? *(const int64_t *)amounts.data() : *(const int32_t *)amounts.data();
    size_t count = input_descs[0]->elements, total = output_descs[0]->elements;
    const char *source = (const char *)in[0]->data;
    if (left < 0 || left + count > total) return fail(500099, "the emulated NPU has no PadV3 that cuts");
    return submit_work(stream, [=] {
      for (size_t i = 0; i < total; i++) memcpy(target + i * width, fill.data(), width);
      memcpy(target + left * width, source, count * width);
      return 0;
    });
  }
  std::string shapes;
  for (int i = 0; i < inputs; i++) shapes += " " + std::to_string(input_descs[i]->dimensions) + "-d of type " + std::to_string(input_descs[i]->type);
  return fail(500099, std::string("the emulated NPU has no aclop operator ") + name + " with inputs" + shapes);
}
}
