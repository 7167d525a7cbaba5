/* A stub of CANN's runtime for tests: one device whose memory is the host's and whose streams run at once.

   What torch_npu calls and would notice is written out here, with the signatures of the headers that torch_npu ships
   (third_party/acl/inc/acl); every other function it wants at load is generated and answers success. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static int allocate(void** out, size_t size) { return posix_memalign(out, 512, size ? size : 1); }
static int handle(void** out) { return allocate(out, 8); }

int aclInit(const char* path) { return 0; }
int aclrtGetDeviceCount(uint32_t* count) { return *count = 1, 0; }
int aclrtGetDevice(int32_t* device) { return *device = 0, 0; }
const char* aclrtGetSocName(void) {
    const char* name = getenv("STUB_SOC_NAME");
    return name ? name : "Ascend310P3";
}
const char* aclGetRecentErrMsg(void) { return ""; }
int aclrtGetCurrentContext(void** out) {
    static int context;
    return *out = &context, 0;
}

int aclrtCreateStream(void** out) { return handle(out); }
int aclrtCreateStreamWithConfig(void** out, uint32_t priority, uint32_t flags) { return handle(out); }
int aclrtDestroyStreamForce(void* stream) { return 0; }
int aclrtGetStreamId(void* stream, int32_t* id) { return *id = 0, 0; }
int aclrtSetStreamFailureMode(void* stream, uint64_t mode) { return 0; }
int aclrtSetStreamOverflowSwitch(void* stream, uint32_t flag) { return 0; }
int aclrtSynchronizeStreamWithTimeout(void* stream, int32_t timeout) { return 0; }
int aclrtSynchronizeDevice(void) { return 0; }
int aclrtCreateEventExWithFlag(void** out, uint32_t flags) { return handle(out); }
int aclrtCreateEventWithFlag(void** out, uint32_t flags) { return handle(out); }
int aclrtQueryEventStatus(void* event, int* status) { return *status = 1, 0; }

int aclrtMalloc(void** out, size_t size, int policy) { return allocate(out, size); }
int aclrtMallocAlign32(void** out, size_t size, int policy) { return allocate(out, size); }
int aclrtFree(void* memory) { return free(memory), 0; }
int aclrtMallocHost(void** out, size_t size) { return allocate(out, size); }
int aclrtFreeHost(void* memory) { return free(memory), 0; }
int aclrtGetMemInfo(int kind, size_t* free_bytes, size_t* total_bytes) {
    return *free_bytes = *total_bytes = (size_t)8 << 30, 0;
}
int aclrtMemcpy(void* to, size_t room, const void* from, size_t size, int kind) { return memcpy(to, from, size), 0; }
int aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t size, int kind, void* stream) {
    return memcpy(to, from, size), 0;
}
int aclrtMemset(void* to, size_t room, int32_t value, size_t size) { return memset(to, value, size), 0; }

int aclrtSetDeviceSatMode(int mode) { return 0; }
int aclrtSetOpExecuteTimeOut(uint32_t seconds) { return 0; }
int aclrtSetOpWaitTimeout(uint32_t seconds) { return 0; }
int aclrtGetSysParamOpt(int option, int64_t* value) { return *value = 0, 0; }
int aclrtSetSysParamOpt(int option, int64_t value) { return 0; }
int aclrtCtxSetSysParamOpt(int option, int64_t value) { return 0; }
int aclSetCompileopt(int option, const char* value) { return 0; }
size_t aclGetCompileoptSize(int option) { return 16; }
int aclGetCompileopt(int option, char* value, size_t size) { return strncpy(value, "disable", size), 0; }
