// liberror_manager: two functions that static initialisers of vllm-ascend's kernel library call, in the old string ABI.
#define _GLIBCXX_USE_CXX11_ABI 0
#include <string>
struct ErrorManager {
  static ErrorManager &GetInstance();
  const std::string &GetLogHeader();
  char room[1024];
};
ErrorManager &ErrorManager::GetInstance() {
  static ErrorManager instance;
  return instance;
}
const std::string &ErrorManager::GetLogHeader() {
  static std::string header(" ");
  return header;
}
