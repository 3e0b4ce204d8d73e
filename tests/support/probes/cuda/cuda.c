/* CUDA's driver library (libcuda.so.1) without a GPU, for tests. It has one device, whose memory is the host's.
 *
 * PLAYED_UUID ends the UUID of the device, as a number below 10. A process notes the MiB that it takes in the file of its
 * number in the folder PLAYED_TAKEN. With PLAYED_CUDA_ERROR, a number, each wait for the device fails with this error, as
 * after a kernel that failed. The functions are those of the product and of tests/gpu that need no other library. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long u64;

enum { OK = 0, INVALID_DEVICE = 101, ILLEGAL_ADDRESS = 700 };

int cuInit(unsigned flags) { return flags ? 1 : OK; }

/* The first call of CUDA's runtime library, which says so. It finds nothing else here. */
int cuDriverGetVersion(int *version) {
    fputs("the CUDA runtime starts\n", stderr);
    *version = 13000;
    return OK;
}

int cuDeviceGetCount(int *count) {
    *count = 1;
    return OK;
}

int cuDeviceGet(int *device, int number) {
    *device = number;
    return number ? INVALID_DEVICE : OK;
}

int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    const char *text = getenv("PLAYED_UUID");
    memset(uuid, 0, 16);
    uuid[15] = text ? (unsigned char)atoi(text) : 0;
    return device ? INVALID_DEVICE : OK;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)1;
    return device ? INVALID_DEVICE : OK;
}

int cuDevicePrimaryCtxRelease_v2(int device) { return device ? INVALID_DEVICE : OK; }
int cuCtxSetCurrent(void *context) { return context ? OK : 1; }
int cuCtxPushCurrent_v2(void *context) { return context ? OK : 1; }

int cuCtxPopCurrent_v2(void **context) {
    *context = (void *)1;
    return OK;
}

int cuCtxSynchronize(void) {
    const char *text = getenv("PLAYED_CUDA_ERROR");
    return text ? atoi(text) : OK;
}

int cuMemAlloc_v2(u64 *address, size_t size) {
    const char *folder = getenv("PLAYED_TAKEN");
    if (folder) {
        char path[512];
        snprintf(path, sizeof path, "%s/%d", folder, getpid());
        FILE *file = fopen(path, "w");
        if (!file) return 1;
        fprintf(file, "%zu", size >> 20);
        fclose(file);
    }
    /* Pages that nobody writes take no memory. */
    *address = (u64)malloc(size);
    return *address ? OK : 2;
}

int cuMemFree_v2(u64 address) {
    free((void *)address);
    return OK;
}

int cuMemcpyHtoD_v2(u64 target, const void *source, size_t size) {
    memcpy((void *)target, source, size);
    return OK;
}

int cuMemcpyDtoH_v2(void *target, u64 source, size_t size) {
    memcpy(target, (void *)source, size);
    return OK;
}

int cuGetErrorString(int error, const char **text) {
    *text = error == ILLEGAL_ADDRESS ? "an illegal memory access was encountered" : "another error";
    return OK;
}
