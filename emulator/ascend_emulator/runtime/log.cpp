// libascendalog: what static initialisers of vllm-ascend's kernel library call. Logging goes nowhere.

int CheckLogLevel(int, int) { return 0; }
void DlogRecord(int, int, const char *, ...) {}
