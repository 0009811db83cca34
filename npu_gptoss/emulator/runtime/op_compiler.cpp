// libacl_op_compiler: options are accepted and remembered nowhere; compiling an operator is not emulated and fails by name.
#include <cstddef>
#include <cstdint>
extern "C" {
int aclSetCompileopt(int, const char *) { return 0; }
size_t aclGetCompileoptSize(int) { return 8; }
int aclGetCompileopt(int, char *value, size_t bytes) {
  if (bytes) value[0] = 0;
  return 0;
}
}
