// Devices, contexts, properties and version: the card of ASCEND_EMULATOR_SOC with the CANN version of ASCEND_EMULATOR_CANN.
#include "machine.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "acl/acl.h"
#include "acl/acl_mdl.h"
#include "acl/acl_op.h"
#include "acl/acl_rt.h"

using namespace emulator;

namespace {
thread_local int current = -1;
int used_first = -1;  // like the driver, a new thread starts on the device that the process set first
char contexts[64];
int count() {
  static int devices = [] {
    const char *visible = getenv("ASCEND_RT_VISIBLE_DEVICES");
    int all = atoi(setting("DEVICES", "1")), listed = 1;
    if (!visible || !*visible) return all;
    for (const char *c = visible; *c; c++) listed += *c == ',';
    return listed < all ? listed : all;
  }();
  return devices;
}
int64_t parameters[64];
}  // namespace

namespace emulator {
int current_device() { return current >= 0 ? current : used_first; }
}  // namespace emulator

extern "C" {
aclError aclInit(const char *) { return ok; }
aclError aclFinalize() { return ok; }
aclError aclrtGetDeviceCount(uint32_t *devices) { *devices = count(); return ok; }
aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= count()) return fail(invalid_device, "device " + std::to_string(device) + " does not exist; there are " + std::to_string(count()));
  current = device;
  if (used_first < 0) used_first = device;
  return ok;
}
aclError aclrtResetDevice(int32_t) { return ok; }
aclError aclrtGetDevice(int32_t *device) {
  if (current_device() < 0) return fail(no_context, "no device is set");
  *device = current_device();
  return ok;
}
aclError aclrtGetCurrentContext(aclrtContext *context) {
  if (current_device() < 0) return fail(no_context, "no device is set");
  *context = &contexts[current_device()];
  return ok;
}
aclError aclrtSetCurrentContext(aclrtContext context) { return aclrtSetDevice((int)((char *)context - contexts)); }
const char *aclrtGetSocName() { return setting("SOC", "Ascend910B3"); }
aclError aclrtGetRunMode(aclrtRunMode *mode) { *mode = ACL_HOST; return ok; }
aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion *version) {
  // torch_npu parses 8.3.RC1, 8.5.0
  memset(version, 0, sizeof *version);
  strncpy(version->version, setting("CANN_SAYS", "8.3.RC1"), sizeof version->version - 1);
  return ok;
}
aclError aclsysGetVersionStr(char *, char *version) { strcpy(version, setting("CANN_SAYS", "8.3.RC1")); return ok; }
aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo info, int64_t *value) {
  int cubes = atoi(setting("CUBES", "20"));
  if (info == ACL_DEVICE_INFO_AI_CORE_NUM) *value = cubes;
  else if (info == ACL_DEVICE_INFO_VECTOR_CORE_NUM) *value = 2 * cubes;
  else if (info == ACL_DEVICE_INFO_L2_SIZE) *value = 192 << 20;
  else return fail(invalid_parameter, "an unknown device property");
  return ok;
}
aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t, int32_t) { *can = 1; return ok; }
aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return ok; }
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ok; }
aclError aclrtSetOpWaitTimeout(uint32_t) { return ok; }
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ok; }
aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ok; }
aclError aclrtGetLastError(aclrtLastErrLevel) { return ok; }
aclError aclrtGetDeviceUtilizationRate(int32_t, aclrtUtilizationInfo *info) { memset(info, 0, sizeof *info); return ok; }
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { parameters[option & 63] = value; return ok; }
aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) { parameters[option & 63] = value; return ok; }
aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) { *value = parameters[option & 63]; return ok; }
void aclAppLog(aclLogLevel level, const char *, const char *, uint32_t, const char *, ...) {}
}
