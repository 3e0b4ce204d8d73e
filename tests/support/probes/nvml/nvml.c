/* A driver library (libnvidia-ml.so.1) without GPUs, for tests. Its devices are in the file that PLAYED_DEVICES names.
 *
 * A line is a GPU or, below its GPU, a slice; memory is in MiB, and `-` is a MIG mode that the GPU does not have:
 *
 *     gpu UUID CAPABILITY MIG TOTAL USED NAME...
 *     mig UUID GPU_SLICES COMPUTE_SLICES TOTAL USED NAME...
 *
 * Each call reads the file again, so the memory in use can change. A handle is the number of the device's line; lines
 * must keep their order, as a real handle keeps its device. PLAYED_INIT_SECONDS is how long the library takes to start,
 * as real ones may. PLAYED_GPM_PERCENT is the utilization of every slice by GPM; without it GPM is not supported. The functions are those that the server calls by pynvml. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9, LOST = 15 };
enum { LINES = 64 };

typedef unsigned long long u64;
typedef struct { u64 total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct {
    unsigned multiprocessors, copy_engines, decoders, encoders, jpegs, ofas, gpu_slices, compute_slices;
    u64 memory_mib;
} Attributes;

typedef struct {
    int is_slice, gpu; /* gpu: of a slice, the number of its GPU's line */
    char uuid[96], name[96], mig[8];
    int major, minor, gpu_slices, compute_slices;
    u64 total_mib, used_mib;
} Line;

static int initialized;

static int read_lines(Line *lines) {
    const char *path = getenv("PLAYED_DEVICES");
    FILE *file = path ? fopen(path, "r") : NULL;
    char text[512];
    int count = 0, gpu = -1;
    if (!file) return -1;
    while (count < LINES && fgets(text, sizeof text, file)) {
        Line *line = &lines[count];
        memset(line, 0, sizeof *line);
        if (sscanf(text, "gpu %95s %d.%d %7s %llu %llu %95[^\n]", line->uuid, &line->major, &line->minor, line->mig,
                   &line->total_mib, &line->used_mib, line->name) == 7)
            gpu = line->gpu = count++;
        else if (sscanf(text, "mig %95s %d %d %llu %llu %95[^\n]", line->uuid, &line->gpu_slices, &line->compute_slices,
                        &line->total_mib, &line->used_mib, line->name) == 6)
            line->is_slice = 1, line->gpu = gpu, count++;
    }
    fclose(file);
    return count;
}

/* Handles count from 1, because 0 is no handle. */
static int find(void *handle, Line *found) {
    Line lines[LINES];
    int count, number = (int)(size_t)handle - 1;
    if (!initialized) return UNINITIALIZED;
    count = read_lines(lines);
    if (number < 0) return INVALID;
    if (number >= count) return LOST;
    *found = lines[number];
    return OK;
}

static int pick(int wants_slice, int gpu, unsigned index, void **handle) {
    Line lines[LINES];
    int count = read_lines(lines);
    if (!initialized) return UNINITIALIZED;
    for (int i = 0; i < count; i++)
        if (lines[i].is_slice == wants_slice && (!wants_slice || lines[i].gpu == gpu) && !index--) {
            *handle = (void *)(size_t)(i + 1);
            return OK;
        }
    return NOT_FOUND;
}

int nvmlInitWithFlags(unsigned flags) {
    Line lines[LINES];
    const char *seconds = getenv("PLAYED_INIT_SECONDS");
    (void)flags;
    if (seconds) sleep((unsigned)atoi(seconds));
    if (read_lines(lines) < 0) return DRIVER_NOT_LOADED;
    initialized++;
    return OK;
}

int nvmlShutdown(void) {
    if (!initialized) return UNINITIALIZED;
    initialized--;
    return OK;
}

const char *nvmlErrorString(int code) {
    (void)code;
    return "an error of the driver for tests";
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    void *handle;
    *count = 0;
    if (!initialized) return UNINITIALIZED;
    while (pick(0, 0, *count, &handle) == OK) ++*count;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { return pick(0, 0, index, handle); }

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    Line lines[LINES];
    int count = read_lines(lines);
    if (!initialized) return UNINITIALIZED;
    for (int i = 0; i < count; i++)
        if (!strcmp(lines[i].uuid, uuid)) {
            *handle = (void *)(size_t)(i + 1);
            return OK;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) {
    (void)handle;
    *count = 7;
    return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **slice) {
    return pick(1, (int)(size_t)handle - 1, index, slice);
}

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    Line line;
    int failed = find(handle, &line);
    if (failed) return failed;
    if (line.is_slice || !strcmp(line.mig, "-")) return NOT_SUPPORTED;
    *current = *pending = (unsigned)atoi(line.mig);
    return OK;
}

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    Line line;
    int failed = find(handle, &line);
    if (failed) return failed;
    *major = line.major;
    *minor = line.minor;
    return OK;
}

int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
    Line line;
    int failed = find(handle, &line);
    if (!failed) snprintf(text, size, "%s", line.uuid);
    return failed;
}

int nvmlDeviceGetName(void *handle, char *text, unsigned size) {
    Line line;
    int failed = find(handle, &line);
    if (!failed) snprintf(text, size, "%s", line.name);
    return failed;
}

int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
    Line line;
    int failed = find(handle, &line);
    if (failed) return failed;
    memory->total = line.total_mib << 20;
    memory->used = line.used_mib << 20;
    memory->free = memory->total - memory->used;
    return OK;
}

int nvmlDeviceGetAttributes_v2(void *handle, Attributes *attributes) {
    Line line;
    int failed = find(handle, &line);
    if (failed) return failed;
    if (!line.is_slice) return NOT_SUPPORTED;
    memset(attributes, 0, sizeof *attributes);
    attributes->gpu_slices = (unsigned)line.gpu_slices;
    attributes->compute_slices = (unsigned)line.compute_slices;
    attributes->memory_mib = line.total_mib;
    return OK;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *slice, void **handle) {
    Line line;
    int failed = find(slice, &line);
    if (failed) return failed;
    if (!line.is_slice) return INVALID;
    *handle = (void *)(size_t)(line.gpu + 1);
    return OK;
}

int nvmlDeviceGetGpuInstanceId(void *slice, unsigned *id) {
    Line line;
    int failed = find(slice, &line);
    if (failed) return failed;
    if (!line.is_slice) return NOT_SUPPORTED;
    *id = (unsigned)(size_t)slice;
    return OK;
}

/* GPM: a sample has the utilization and the number of the instance. The metric of two samples is that of the last. */
typedef struct { double percent; unsigned instance; } Sample;
typedef struct { unsigned version, supported; } Support;
typedef struct { unsigned id; int result; double value; const char *names[3]; } Metric;
typedef struct { unsigned version, count; Sample *from, *to; Metric metrics[]; } Metrics;

int nvmlGpmQueryDeviceSupport(void *handle, Support *support) {
    Line line;
    int failed = find(handle, &line);
    if (!failed) support->supported = getenv("PLAYED_GPM_PERCENT") != NULL;
    return failed;
}

int nvmlGpmSampleAlloc(Sample **sample) {
    *sample = calloc(1, sizeof **sample);
    return OK;
}

int nvmlGpmMigSampleGet(void *handle, unsigned instance, Sample *sample) {
    Line line;
    const char *percent = getenv("PLAYED_GPM_PERCENT");
    int failed = find(handle, &line);
    if (failed) return failed;
    if (line.is_slice || !percent) return NOT_SUPPORTED;
    sample->percent = atof(percent);
    sample->instance = instance;
    return OK;
}

int nvmlGpmMetricsGet(Metrics *metrics) {
    if (metrics->version != 1 || metrics->count != 1 || metrics->metrics[0].id != 1) return INVALID;
    if (!metrics->from->instance || metrics->from->instance != metrics->to->instance) return INVALID;
    metrics->metrics[0].result = OK;
    metrics->metrics[0].value = metrics->to->percent;
    return OK;
}

/* A slice has neither utilization nor power of its own. */
static int of_gpu(void *handle, unsigned value, unsigned *result) {
    Line line;
    int failed = find(handle, &line);
    if (failed) return failed;
    if (line.is_slice) return NOT_SUPPORTED;
    *result = value;
    return OK;
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) { return of_gpu(handle, 210500, milliwatts); }
int nvmlDeviceGetPowerManagementLimit(void *handle, unsigned *milliwatts) { return of_gpu(handle, 700000, milliwatts); }
int nvmlDeviceGetUtilizationRates(void *handle, Utilization *rates) {
    rates->memory = 7;
    return of_gpu(handle, 42, &rates->gpu);
}

int nvmlDeviceGetTotalEnergyConsumption(void *handle, u64 *millijoules) {
    unsigned value;
    int failed = of_gpu(handle, 5000, &value);
    if (!failed) *millijoules = value;
    return failed;
}
