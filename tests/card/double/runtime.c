/* A CUDA runtime with one card, whose memory is the host's.

   torch's own allocator, streams, events and checks of devices run on top of it as on a real card; kernels do nothing,
   so there are sizes and places but no numbers, no speed and no races. The card's compute capability and bytes come from
   the environment: CARD_MAJOR, CARD_MINOR, CARD_BYTES; so does what lies there beside tensors, once there is any:
   CARD_CONTEXT, and what others hold of it: CARD_OTHERS. What torch links to beside this is stubbed by build.py. */

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define DONE return cudaSuccess
#define MOST_BLOCKS 65536

typedef struct { char *start; size_t size; int is_device; } Block;

static Block blocks[MOST_BLOCKS];
static int num_blocks = 0;
static size_t held = 0;
static int has_context = 0;
static long tickets = 0x1000;
static long waits = 0, copies = 0;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static long setting(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}
static size_t card_bytes(void) { return (size_t)setting("CARD_BYTES", 24L << 30); }
static int major(void) { return (int)setting("CARD_MAJOR", 8); }
static int minor(void) { return (int)setting("CARD_MINOR", 9); }

/* What a block may share, which decides between kernels: by NVIDIA's table of compute capabilities. */
static size_t shared_bytes(void) {
    int both = 10 * major() + minor();
    size_t kib = both < 75 ? 96 : both == 75 ? 64 : both == 80 ? 163 : both == 90 || both == 100 ? 227 : 99;
    return kib << 10;
}

/* What the driver says of the card's memory. */
size_t card_total(void) { return card_bytes(); }
size_t card_used(void) { return held + (has_context ? setting("CARD_CONTEXT", 0) : 0) + setting("CARD_OTHERS", 0); }

/* How often the host waited for the card so far, and how many copies were made: read by ctypes. */
long card_waits(void) { return waits; }
long card_copies(void) { return copies; }

static Block *block_of(const void *at) {
    for (int i = 0; i < num_blocks; i++)
        if ((char *)at >= blocks[i].start && (char *)at < blocks[i].start + blocks[i].size) return &blocks[i];
    return NULL;
}
static void remember(void *start, size_t size, int is_device) {
    pthread_mutex_lock(&lock);
    blocks[num_blocks].start = start;
    blocks[num_blocks].size = size;
    blocks[num_blocks++].is_device = is_device;
    if (is_device) held += size;
    pthread_mutex_unlock(&lock);
}
static size_t forget(void *start) {
    size_t size = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_blocks; i++)
        if (blocks[i].start == start) {
            size = blocks[i].size;
            if (blocks[i].is_device) held -= size;
            blocks[i] = blocks[--num_blocks];
            break;
        }
    pthread_mutex_unlock(&lock);
    return size;
}

/* the card */
cudaError_t cudaGetDeviceCount(int *count) { *count = 1; DONE; }
cudaError_t cudaGetDevice(int *device) { *device = 0; DONE; }
cudaError_t cudaSetDevice(int device) { DONE; }
static cudaError_t describe(struct cudaDeviceProp *card) {
    memset(card, 0, sizeof *card);
    strcpy(card->name, "Double of a card");
    card->major = major();
    card->minor = minor();
    card->totalGlobalMem = card_bytes();
    card->multiProcessorCount = 128;
    card->warpSize = 32;
    card->maxThreadsPerBlock = 1024;
    card->maxThreadsPerMultiProcessor = 2048;
    card->regsPerMultiprocessor = 65536;
    card->sharedMemPerBlock = 48 << 10;
    card->sharedMemPerBlockOptin = shared_bytes();
    card->sharedMemPerMultiprocessor = shared_bytes() + 1024;
    card->l2CacheSize = 48 << 20;
    card->maxGridSize[0] = 2147483647;
    card->maxGridSize[1] = card->maxGridSize[2] = 65535;
    card->unifiedAddressing = 1;
    DONE;
}
#undef cudaGetDeviceProperties
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *card, int device) { return describe(card); }
cudaError_t cudaGetDeviceProperties_v2(struct cudaDeviceProp *card, int device) { return describe(card); }
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
    *value = 0;
    if (which == cudaDevAttrComputeCapabilityMajor) *value = major();
    if (which == cudaDevAttrComputeCapabilityMinor) *value = minor();
    if (which == cudaDevAttrMultiProcessorCount) *value = 128;
    if (which == cudaDevAttrMaxSharedMemoryPerBlockOptin) *value = (int)shared_bytes();
    if (which == cudaDevAttrMaxSharedMemoryPerBlock) *value = 48 << 10;
    DONE;
}
cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; DONE; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = 13000; DONE; }
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) { *total = card_bytes(); has_context = 1; *free = *total - card_used(); DONE; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int one, int other) { *can = 0; DONE; }
cudaError_t cudaGetLastError(void) { DONE; }
cudaError_t cudaPeekAtLastError(void) { DONE; }
const char *cudaGetErrorName(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "out of memory" : "error"; }
const char *cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

/* memory */
cudaError_t cudaMalloc(void **start, size_t size) {
    has_context = 1;
    if (card_used() + size > card_bytes()) return cudaErrorMemoryAllocation;
    *start = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*start == MAP_FAILED) return cudaErrorMemoryAllocation;
    remember(*start, size, 1);
    DONE;
}
cudaError_t cudaFree(void *start) {
    size_t size = start ? forget(start) : 0;
    if (size) munmap(start, size);
    DONE;
}
cudaError_t cudaMallocAsync(void **start, size_t size, cudaStream_t stream) { return cudaMalloc(start, size); }
cudaError_t cudaFreeAsync(void *start, cudaStream_t stream) { return cudaFree(start); }
cudaError_t cudaHostAlloc(void **start, size_t size, unsigned flags) {
    if (posix_memalign(start, 4096, size)) return cudaErrorMemoryAllocation;
    remember(*start, size, 0);
    DONE;
}
cudaError_t cudaFreeHost(void *start) { forget(start); free(start); DONE; }
cudaError_t cudaHostRegister(void *start, size_t size, unsigned flags) {
    if (block_of(start)) return cudaErrorHostMemoryAlreadyRegistered;
    remember(start, size, 0);
    DONE;
}
cudaError_t cudaHostUnregister(void *start) { return forget(start) ? cudaSuccess : cudaErrorHostMemoryNotRegistered; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *at) {
    Block *block = block_of(at);
    memset(found, 0, sizeof *found);
    found->type = !block ? cudaMemoryTypeUnregistered : block->is_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    found->devicePointer = found->hostPointer = (void *)at;
    DONE;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    waits++, copies++;
    memmove(to, from, size);
    DONE;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    copies++;
    memmove(to, from, size);
    DONE;
}
cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t size, cudaStream_t stream) {
    copies++;
    memmove(to, from, size);
    DONE;
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream) {
    copies++;
    for (size_t row = 0; row < height; row++) memmove((char *)to + row * to_pitch, (char *)from + row * from_pitch, width);
    DONE;
}
cudaError_t cudaMemset(void *start, int value, size_t size) { memset(start, value, size); DONE; }
cudaError_t cudaMemsetAsync(void *start, int value, size_t size, cudaStream_t stream) { memset(start, value, size); DONE; }

/* streams and events: everything is done as soon as it is asked for */
static void *ticket(void) { return (void *)__sync_add_and_fetch(&tickets, 1); }
cudaError_t cudaStreamCreate(cudaStream_t *stream) { *stream = ticket(); DONE; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { *stream = ticket(); DONE; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) { *stream = ticket(); DONE; }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { DONE; }
cudaError_t cudaStreamQuery(cudaStream_t stream) { DONE; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { waits++; DONE; }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { DONE; }
cudaError_t cudaDeviceSynchronize(void) { waits++; DONE; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = 0; DONE; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; DONE; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    DONE;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { DONE; }
cudaError_t cudaEventCreate(cudaEvent_t *event) { *event = ticket(); DONE; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { *event = ticket(); DONE; }
cudaError_t cudaEventDestroy(cudaEvent_t event) { DONE; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { DONE; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { DONE; }
cudaError_t cudaEventQuery(cudaEvent_t event) { DONE; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { waits++; DONE; }
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) { *milliseconds = 1; DONE; }

/* kernels do nothing */
cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) { DONE; }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *kernel, void **arguments) { DONE; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *kernel) {
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    found->binaryVersion = found->ptxVersion = 10 * major() + minor();
    DONE;
}
cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute which, int value) { DONE; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *kernel, int size, size_t shared) { *count = 1; DONE; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *kernel, int size, size_t shared, unsigned flags) {
    *count = 1;
    DONE;
}

/* the driver, as the runtime hands its functions out; what it maps is what blocks that grow are made of */
#define PAGE_BYTES (2UL << 20)
static int nothing(void) { return 0; }
static int attribute(int *value, int which, int device) { *value = 1; return 0; }
static int granularity(size_t *size, const void *what, int which) { *size = PAGE_BYTES; return 0; }
static int reserve_addresses(unsigned long long *start, size_t size, size_t aligned, unsigned long long at, unsigned long long flags) {
    void *found = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return 2;
    remember(found, size, 1);
    held -= size; /* addresses, not memory */
    *start = (unsigned long long)found;
    return 0;
}
static int free_addresses(unsigned long long start, size_t size) {
    held += size;
    forget((void *)start);
    return munmap((void *)start, size);
}
static int make_pages(unsigned long long *handle, size_t size, const void *what, unsigned long long flags) {
    has_context = 1;
    if (card_used() + size > card_bytes()) return 2;
    held += size;
    *handle = size; /* all that is to be known of them */
    return 0;
}
static int release_pages(unsigned long long handle) { held -= handle; return 0; }
static int unmap(unsigned long long start, size_t size) { return madvise((void *)start, size, MADV_DONTNEED); }
static int error_words(int error, const char **words) { *words = error == 2 ? "out of memory" : "error"; return 0; }
static int context_state(int device, unsigned *flags, int *is_active) { *flags = 0; *is_active = 1; return 0; }
static int driver_version(int *version) { *version = 13000; return 0; }
static int device_count(int *count) { *count = 1; return 0; }
#undef cudaGetDriverEntryPoint
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found) {
    *function = (void *)nothing;
    if (!strcmp(name, "cuDevicePrimaryCtxGetState")) *function = (void *)context_state;
    if (!strcmp(name, "cuDriverGetVersion")) *function = (void *)driver_version;
    if (!strcmp(name, "cuDeviceGetCount")) *function = (void *)device_count;
    if (!strcmp(name, "cuDeviceGetAttribute")) *function = (void *)attribute;
    if (!strcmp(name, "cuMemGetAllocationGranularity")) *function = (void *)granularity;
    if (!strcmp(name, "cuMemAddressReserve")) *function = (void *)reserve_addresses;
    if (!strcmp(name, "cuMemAddressFree")) *function = (void *)free_addresses;
    if (!strcmp(name, "cuMemCreate")) *function = (void *)make_pages;
    if (!strcmp(name, "cuMemRelease")) *function = (void *)release_pages;
    if (!strcmp(name, "cuMemUnmap")) *function = (void *)unmap;
    if (!strcmp(name, "cuGetErrorString")) *function = (void *)error_words;
    if (found) *found = cudaDriverEntryPointSuccess;
    DONE;
}
cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *found) {
    return cudaGetDriverEntryPointByVersion(name, function, 13000, flags, found);
}

/* libraries that give something back; the rest of them is stubbed */
int cublasCreate_v2(void **handle) { *handle = calloc(1, 64); return 0; }
int cublasDestroy_v2(void *handle) { free(handle); return 0; }
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
size_t cublasLtGetVersion(void) { return 130000; }
int cublasLtMatmulDescCreate(void **made) { *made = calloc(1, 512); return 0; }
int cublasLtMatmulDescDestroy(void *made) { free(made); return 0; }
int cublasLtMatmulPreferenceCreate(void **made) { *made = calloc(1, 512); return 0; }
int cublasLtMatmulPreferenceDestroy(void *made) { free(made); return 0; }
int cublasLtMatrixLayoutCreate(void **made) { *made = calloc(1, 512); return 0; }
int cublasLtMatrixLayoutDestroy(void *made) { free(made); return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *how, void *a, void *b, void *c, void *d, void *wanted, int most,
                                   char *result, int *found) {
    memset(result, 0, 96);
    *found = 1;
    return 0;
}
