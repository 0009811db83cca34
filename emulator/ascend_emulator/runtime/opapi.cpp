// libopapi: the few aclnn operators that torch_npu's C++ calls without its dispatcher (collectives fill and copy their
// buffers so). Everything else is answered in Python, above aclnn; an operator missing here fails by its name.
#include <cstdint>
#include <cstring>
#include <vector>

#include "acl/acl.h"
#include "machine.h"

using namespace emulator;

struct aclTensor {
  std::vector<int64_t> size, stride;
  int64_t offset;
  int type;
  char *data;
};
struct aclScalar {
  char value[16];
  int type;
};
namespace {
struct Execution { std::function<int()> work; };

double read(const char *p, int type) {
  switch (type) {
    case ACL_FLOAT: return *(const float *)p;
    case ACL_DOUBLE: return *(const double *)p;
    case ACL_INT64: return (double)*(const int64_t *)p;
    case ACL_INT32: return *(const int32_t *)p;
    case ACL_BOOL: return *(const bool *)p;
  }
  return 0;
}

// The scalar as the bytes of one element; false for a type that is not emulated.
bool element(const aclScalar *scalar, int type, std::vector<char> &bytes) {
  double value = read(scalar->value, scalar->type);
  size_t width = aclDataTypeSize((aclDataType)type);
  bytes.assign(width, 0);
  float narrow = (float)value;
  uint32_t bits;
  memcpy(&bits, &narrow, 4);
  uint16_t bfloat = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  _Float16 half = (_Float16)narrow;
  int64_t whole = scalar->type == ACL_INT64 ? *(const int64_t *)scalar->value : (int64_t)value;
  switch (type) {
    case ACL_FLOAT: memcpy(bytes.data(), &narrow, 4); return true;
    case ACL_DOUBLE: memcpy(bytes.data(), &value, 8); return true;
    case ACL_BF16: memcpy(bytes.data(), &bfloat, 2); return true;
    case ACL_FLOAT16: memcpy(bytes.data(), &half, 2); return true;
    case ACL_INT8: case ACL_UINT8: case ACL_INT16: case ACL_INT32: case ACL_INT64: case ACL_BOOL:
      memcpy(bytes.data(), &whole, width);
      return true;
  }
  return false;
}

template <class Each> void each_element(const aclTensor &tensor, Each each) {
  size_t width = aclDataTypeSize((aclDataType)tensor.type), count = 1;
  for (int64_t n : tensor.size) count *= n;
  for (size_t i = 0; i < count; i++) {
    int64_t position = tensor.offset;
    size_t rest = i;
    for (size_t d = tensor.size.size(); d-- > 0; rest /= tensor.size[d]) position += (rest % tensor.size[d]) * tensor.stride[d];
    each(i, tensor.data + position * width);
  }
}

int fill(const aclTensor &tensor, const std::vector<char> &bytes) {
  each_element(tensor, [&](size_t, char *p) { memcpy(p, bytes.data(), bytes.size()); });
  return 0;
}
int run(Execution *execution, aclrtStream stream) {
  std::function<int()> work = std::move(execution->work);
  delete execution;
  return submit_work(stream_of(stream), work);
}
}  // namespace

extern "C" {
size_t aclDataTypeSize(aclDataType type) {
  switch (type) {
    case ACL_FLOAT16: case ACL_BF16: case ACL_INT16: return 2;
    case ACL_FLOAT: case ACL_INT32: return 4;
    case ACL_INT64: case ACL_DOUBLE: return 8;
    default: return 1;
  }
}
aclTensor *aclCreateTensor(const int64_t *size, uint64_t dimensions, aclDataType type, const int64_t *stride, int64_t offset, aclFormat, const int64_t *, uint64_t, void *data) {
  return new aclTensor{{size, size + dimensions}, {stride, stride + dimensions}, offset, type, (char *)data};
}
int aclDestroyTensor(const aclTensor *tensor) { delete tensor; return 0; }
aclScalar *aclCreateScalar(void *value, aclDataType type) {
  auto scalar = new aclScalar{{0}, type};
  memcpy(scalar->value, value, aclDataTypeSize(type));
  return scalar;
}
int aclDestroyScalar(const aclScalar *scalar) { delete scalar; return 0; }

int aclnnInplaceFillScalarGetWorkspaceSize(aclTensor *tensor, const aclScalar *value, uint64_t *workspace, Execution **execution) {
  std::vector<char> bytes;
  if (!element(value, tensor->type, bytes)) return fail(161002, "aclnnInplaceFillScalar: this data type is not emulated");
  aclTensor target = *tensor;
  *workspace = 0, *execution = new Execution{[=] { return fill(target, bytes); }};
  return 0;
}
int aclnnInplaceFillScalar(void *, uint64_t, Execution *execution, aclrtStream stream) { return run(execution, stream); }

int aclnnInplaceZeroGetWorkspaceSize(aclTensor *tensor, uint64_t *workspace, Execution **execution) {
  std::vector<char> bytes(aclDataTypeSize((aclDataType)tensor->type));
  aclTensor target = *tensor;
  *workspace = 0, *execution = new Execution{[=] { return fill(target, bytes); }};
  return 0;
}
int aclnnInplaceZero(void *, uint64_t, Execution *execution, aclrtStream stream) { return run(execution, stream); }

int aclnnInplaceCopyGetWorkspaceSize(aclTensor *to, const aclTensor *from, uint64_t *workspace, Execution **execution) {
  if (to->type != from->type || to->size != from->size) return fail(161002, "aclnnInplaceCopy below the dispatcher converts nothing on the emulated NPU");
  aclTensor target = *to, source = *from;
  *workspace = 0, *execution = new Execution{[=] {
    size_t width = aclDataTypeSize((aclDataType)target.type);
    std::vector<char *> places;
    each_element(source, [&](size_t, char *p) { places.push_back(p); });
    each_element(target, [&](size_t i, char *p) { memcpy(p, places[i], width); });
    return 0;
  }};
  return 0;
}
int aclnnInplaceCopy(void *, uint64_t, Execution *execution, aclrtStream stream) { return run(execution, stream); }
}
