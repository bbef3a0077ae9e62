/* As much of a driver and of NVML as torch and its libraries look for by name.

   A driver's context is there as soon as memory is. What others hold of the card comes from CARD_OTHERS. */

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

extern size_t card_used(void), card_total(void);

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) { *flags = 0; *is_active = 1; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }

int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int error) { return "error"; }
int nvmlDeviceGetHandleByUUID(const char *name, void **device) { *device = (void *)1; return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *name, void **device) { *device = (void *)1; return 0; }
int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) { return 3; /* no such thing */ }
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) {
    memory[0] = card_total();
    memory[2] = card_used();
    memory[1] = memory[0] - memory[2];
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *found) { *count = 0; return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info) { return 3; }
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *found) { *count = 0; return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)1; return 0; }
int nvmlDeviceGetUUID(void *device, char *name, unsigned size) { strncpy(name, "GPU-00000000-0000-0000-0000-000000000000", size); return 0; }
int nvmlDeviceGetP2PStatus(void *one, void *other, int which, int *status) { *status = 1; return 0; }
