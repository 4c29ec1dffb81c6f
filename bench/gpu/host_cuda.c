/* A CUDA driver whose GPU is host memory, for the calls that Baton makes through ctypes: compiled against NVIDIA's own header, which
 * checks every signature. What holds of a GPU holds here:
 *
 * - a thread has to enter a context before it does anything else;
 * - an allocation's handle opens in another process, never in its own, and maps the same bytes there;
 * - what is queued on a stream happens once the stream is waited for, not before, and in order;
 * - an event has happened once the stream on which it was recorded has come so far, and a stream may wait for it;
 * - what touches memory that nobody allocated is an illegal address, told by whoever waits.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define CHECK(condition, status) \
    do {                         \
        if (!(condition)) return (status); \
    } while (0)
#define ENTERED CHECK(current, CUDA_ERROR_INVALID_CONTEXT)

static const unsigned long MAGIC = 0x6f74616241554443ul;

typedef struct Span { /* memory that this process may touch: its own, or another's that it opened */
    struct Span *next;
    char *base;
    size_t size;
    int memory;      /* descriptor */
    int owner;       /* process */
    int owner_memory; /* the descriptor's number there */
    int times_open;
} Span;

typedef struct {
    unsigned long magic;
    int owner, memory;
    size_t size;
} Named; /* what a handle's 64 bytes hold */

typedef struct Work { /* one of the three */
    struct Work *next;
    CUevent recorded, awaited;
    CUDA_MEMCPY2D copy;
} Work;

struct CUctx_st {
    int device;
};
struct CUstream_st {
    Work *first, **last;
};
struct CUevent_st {
    CUstream stream; /* on which it was recorded */
    int happened;
};

static struct CUctx_st primary;
static _Thread_local CUcontext current;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Span *spans;

static Span *find(CUdeviceptr address, size_t size) {
    for (Span *span = spans; span; span = span->next)
        if ((char *)address >= span->base && (char *)address + size <= span->base + span->size) return span;
    return NULL;
}

static int touchable(CUdeviceptr address, size_t size) {
    pthread_mutex_lock(&lock);
    int found = find(address, size) != NULL;
    pthread_mutex_unlock(&lock);
    return found;
}

static Span *map(int memory, size_t size) {
    char *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    if (base == MAP_FAILED) return NULL;
    Span *span = calloc(1, sizeof *span);
    *span = (Span){.next = spans, .base = base, .size = size, .memory = memory};
    return spans = span;
}

static void unmap(Span *gone) {
    Span **at = &spans;
    while (*at != gone) at = &(*at)->next;
    *at = gone->next;
    munmap(gone->base, gone->size);
    close(gone->memory);
    free(gone);
}

CUresult cuInit(unsigned flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }

CUresult cuGetErrorString(CUresult error, const char **words) {
    switch (error) {
        case CUDA_ERROR_INVALID_VALUE: *words = "invalid argument"; return CUDA_SUCCESS;
        case CUDA_ERROR_OUT_OF_MEMORY: *words = "out of memory"; return CUDA_SUCCESS;
        case CUDA_ERROR_INVALID_DEVICE: *words = "invalid device ordinal"; return CUDA_SUCCESS;
        case CUDA_ERROR_INVALID_CONTEXT: *words = "invalid device context"; return CUDA_SUCCESS;
        case CUDA_ERROR_INVALID_HANDLE: *words = "invalid resource handle"; return CUDA_SUCCESS;
        case CUDA_ERROR_ILLEGAL_ADDRESS: *words = "an illegal memory access was encountered"; return CUDA_SUCCESS;
        default: *words = NULL; return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult cuDeviceGetCount(int *count) {
    *count = 1;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    CHECK(ordinal == 0, CUDA_ERROR_INVALID_DEVICE);
    *device = 0;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    CHECK(device == 0, CUDA_ERROR_INVALID_DEVICE);
    *context = &primary;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    CHECK(!context || context == &primary, CUDA_ERROR_INVALID_CONTEXT);
    current = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void) {
    ENTERED;
    return CUDA_SUCCESS; /* nothing is ever queued outside a stream, and streams here are waited for by themselves */
}

CUresult cuMemAlloc(CUdeviceptr *address, size_t size) {
    ENTERED;
    CHECK(size, CUDA_ERROR_INVALID_VALUE);
    int memory = memfd_create("host-cuda", MFD_CLOEXEC);
    CHECK(memory >= 0 && !ftruncate(memory, size), CUDA_ERROR_OUT_OF_MEMORY);
    pthread_mutex_lock(&lock);
    Span *span = map(memory, size);
    if (span) {
        span->owner = getpid();
        span->owner_memory = memory;
        memset(span->base, 0xA5, size); /* a GPU's memory is not empty either */
        *address = (CUdeviceptr)span->base;
    }
    pthread_mutex_unlock(&lock);
    return span ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemFree(CUdeviceptr address) {
    ENTERED;
    pthread_mutex_lock(&lock);
    Span *span = find(address, 1);
    int ours = span && (char *)address == span->base && !span->times_open;
    if (ours) unmap(span);
    pthread_mutex_unlock(&lock);
    return ours ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    ENTERED;
    pthread_mutex_lock(&lock);
    Span *span = find(address, 1);
    if (span) {
        *base = (CUdeviceptr)span->base;
        *size = span->size;
    }
    pthread_mutex_unlock(&lock);
    return span ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    ENTERED;
    pthread_mutex_lock(&lock);
    Span *span = find(address, 1);
    int ours = span && span->owner == getpid();
    if (ours) {
        Named named = {.magic = MAGIC, .owner = span->owner, .memory = span->memory, .size = span->size};
        memset(handle, 0, sizeof *handle);
        memcpy(handle->reserved, &named, sizeof named);
    }
    pthread_mutex_unlock(&lock);
    return ours ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static Span *open_named(const Named *named) { /* under the lock */
    for (Span *span = spans; span; span = span->next)
        if (span->owner == named->owner && span->owner_memory == named->memory && span->times_open) return span;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", named->owner, named->memory);
    int memory = open(path, O_RDWR | O_CLOEXEC);
    Span *span = memory < 0 ? NULL : map(memory, named->size);
    if (span) {
        span->owner = named->owner;
        span->owner_memory = named->memory;
    }
    return span;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags) {
    ENTERED;
    Named named;
    memcpy(&named, handle.reserved, sizeof named);
    CHECK(named.magic == MAGIC && flags == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, CUDA_ERROR_INVALID_VALUE);
    CHECK(named.owner != getpid(), CUDA_ERROR_INVALID_CONTEXT);
    pthread_mutex_lock(&lock);
    Span *span = open_named(&named);
    if (span) {
        span->times_open++;
        *address = (CUdeviceptr)span->base;
    }
    pthread_mutex_unlock(&lock);
    return span ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    ENTERED;
    pthread_mutex_lock(&lock);
    Span *span = find(address, 1);
    int open = span && span->times_open && (char *)address == span->base;
    if (open && !--span->times_open) unmap(span);
    pthread_mutex_unlock(&lock);
    return open ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemHostAlloc(void **address, size_t size, unsigned flags) {
    ENTERED;
    CHECK(flags == CU_MEMHOSTALLOC_PORTABLE, CUDA_ERROR_INVALID_VALUE);
    *address = malloc(size);
    return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    ENTERED;
    CHECK(flags == CU_STREAM_NON_BLOCKING, CUDA_ERROR_INVALID_VALUE);
    *stream = calloc(1, sizeof **stream);
    (*stream)->last = &(*stream)->first;
    return CUDA_SUCCESS;
}

static CUresult run(const CUDA_MEMCPY2D *copy) {
    int from_host = copy->srcMemoryType == CU_MEMORYTYPE_HOST, to_host = copy->dstMemoryType == CU_MEMORYTYPE_HOST;
    for (size_t row = 0; row < copy->Height; row++) {
        CUdeviceptr source = (from_host ? (CUdeviceptr)copy->srcHost : copy->srcDevice) + row * copy->srcPitch;
        CUdeviceptr target = (to_host ? (CUdeviceptr)copy->dstHost : copy->dstDevice) + row * copy->dstPitch;
        CHECK(from_host || touchable(source, copy->WidthInBytes), CUDA_ERROR_ILLEGAL_ADDRESS);
        CHECK(to_host || touchable(target, copy->WidthInBytes), CUDA_ERROR_ILLEGAL_ADDRESS);
        memcpy((void *)target, (void *)source, copy->WidthInBytes);
    }
    return CUDA_SUCCESS;
}

static CUresult step(CUstream stream) { /* what was queued first */
    Work *work = stream->first;
    CUresult status = CUDA_SUCCESS;
    stream->first = work->next;
    if (!stream->first) stream->last = &stream->first;
    if (work->recorded) work->recorded->happened = 1;
    else if (!work->awaited) status = run(&work->copy);
    else
        while (!work->awaited->happened && status == CUDA_SUCCESS) status = step(work->awaited->stream);
    free(work);
    return status;
}

CUresult cuStreamSynchronize(CUstream stream) {
    ENTERED;
    CUresult first = CUDA_SUCCESS;
    while (stream->first) {
        CUresult status = step(stream);
        if (first == CUDA_SUCCESS) first = status;
    }
    return first;
}

CUresult cuStreamDestroy(CUstream stream) {
    ENTERED;
    CUresult status = cuStreamSynchronize(stream);
    free(stream);
    return status;
}

static CUresult queue(CUstream stream, Work work) {
    ENTERED;
    CHECK(stream, CUDA_ERROR_INVALID_HANDLE);
    *stream->last = malloc(sizeof work);
    **stream->last = work;
    stream->last = &(*stream->last)->next;
    return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent *event, unsigned flags) {
    ENTERED;
    CHECK(flags == CU_EVENT_DEFAULT, CUDA_ERROR_INVALID_VALUE);
    *event = calloc(1, sizeof **event);
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    ENTERED;
    CHECK(event && stream, CUDA_ERROR_INVALID_HANDLE);
    *event = (struct CUevent_st){.stream = stream};
    return queue(stream, (Work){.recorded = event});
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    CHECK(event && event->stream && flags == CU_EVENT_WAIT_DEFAULT, CUDA_ERROR_INVALID_HANDLE);
    return queue(stream, (Work){.awaited = event});
}

CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D *copy, CUstream stream) {
    int device = CU_MEMORYTYPE_DEVICE;
    CHECK((int)copy->srcMemoryType == device && (int)copy->dstMemoryType == device, CUDA_ERROR_INVALID_VALUE);
    CHECK(copy->srcPitch >= copy->WidthInBytes && copy->dstPitch >= copy->WidthInBytes, CUDA_ERROR_INVALID_VALUE);
    CHECK(!copy->srcXInBytes && !copy->srcY && !copy->dstXInBytes && !copy->dstY, CUDA_ERROR_INVALID_VALUE);
    return queue(stream, (Work){.copy = *copy});
}

static CUDA_MEMCPY2D line(size_t size) {
    return (CUDA_MEMCPY2D){
        .srcMemoryType = CU_MEMORYTYPE_DEVICE, .dstMemoryType = CU_MEMORYTYPE_DEVICE, .WidthInBytes = size, .Height = 1};
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr target, CUdeviceptr source, size_t size, CUstream stream) {
    Work work = {.copy = line(size)};
    work.copy.srcDevice = source;
    work.copy.dstDevice = target;
    return queue(stream, work);
}

CUresult cuMemcpyDtoHAsync(void *target, CUdeviceptr source, size_t size, CUstream stream) {
    Work work = {.copy = line(size)};
    work.copy.srcDevice = source;
    work.copy.dstMemoryType = CU_MEMORYTYPE_HOST;
    work.copy.dstHost = target;
    return queue(stream, work);
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr target, const void *source, size_t size, CUstream stream) {
    Work work = {.copy = line(size)};
    work.copy.srcMemoryType = CU_MEMORYTYPE_HOST;
    work.copy.srcHost = source;
    work.copy.dstDevice = target;
    return queue(stream, work);
}

CUresult cuMemcpyHtoD(CUdeviceptr target, const void *source, size_t size) {
    ENTERED;
    CHECK(touchable(target, size), CUDA_ERROR_INVALID_VALUE);
    memcpy((void *)target, source, size);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoH(void *target, CUdeviceptr source, size_t size) {
    ENTERED;
    CHECK(touchable(source, size), CUDA_ERROR_INVALID_VALUE);
    memcpy(target, (void *)source, size);
    return CUDA_SUCCESS;
}

CUresult cuMemsetD8(CUdeviceptr target, unsigned char value, size_t size) {
    ENTERED;
    CHECK(touchable(target, size), CUDA_ERROR_INVALID_VALUE);
    memset((void *)target, value, size);
    return CUDA_SUCCESS;
}
