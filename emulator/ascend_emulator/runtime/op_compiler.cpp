// libacl_op_compiler: options are remembered; compiling an operator is not emulated and fails by its name. A 910B answers
// "disable" for ACL_OP_JIT_COMPILE, and then torch_npu prefers aclnn to the operators that would be compiled.
#include <cstddef>
#include <cstring>
#include <map>
#include <string>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"

static std::map<int, std::string> &options() {
  static std::map<int, std::string> values{{ACL_OP_JIT_COMPILE, "disable"}};
  return values;
}
extern "C" {
aclError aclSetCompileopt(aclCompileOpt option, const char *value) {
  options()[option] = value;
  return 0;
}
size_t aclGetCompileoptSize(aclCompileOpt option) { return options()[option].size() + 1; }
aclError aclGetCompileopt(aclCompileOpt option, char *value, size_t bytes) {
  if (bytes < options()[option].size() + 1) return 100000;
  strcpy(value, options()[option].c_str());
  return 0;
}
}
