/*
 * External memory by AMD's rules: the descriptor stays the caller's, whatever comes of it; every import that fails is
 * out of memory; and a mapping is the object's address plus the offset, so that one offset has one pointer.
 *
 * CUDA maps each range at an address of its own. So the whole object is mapped when the first range is asked for, and
 * every range is a part of that. hipFree takes a pointer back; when it was the last one, the object is unmapped (AMD
 * keeps the address as long as the object lives: a later mapping may lie elsewhere here). CUDA wants an object's
 * mappings freed before the object is destroyed and AMD does not care, so a destruction is put off until they are.
 */
#define _GNU_SOURCE
#include "forwarding.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct memory memory;

typedef struct region {
    memory *owner;
    uint64_t base, extent;
    uint64_t *pointers; /* handed out, and not freed */
    size_t count, room;
    int frees; /* under way, without the lock: as long as there is one the region stays */
    uint64_t *probes; /* mapped to find the object's size, and freed with the rest: a free waits for the device */
    size_t probe_count;
    struct region *next;
} region;

struct memory {
    void *cuda;
    int device;
    uint64_t size; /* as the import claimed */
    bool destroyed;
    region *current; /* where further ranges are taken from; those that are being freed are in the list only */
    int regions, arrays;
    memory *next;
};

typedef struct array {
    void *cuda;
    memory *owner;
    uint32_t levels; /* as HIP was told */
    struct array *next;
} array;

static memory *memories;
static region *regions;
static array *arrays;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* From the duplicate to the check no other import may be given the number that CUDA closes. */
static pthread_mutex_t import_lock = PTHREAD_MUTEX_INITIALIZER;

static void after_fork(void) {
    pthread_mutex_init(&lock, NULL);
    pthread_mutex_init(&import_lock, NULL);
}
__attribute__((constructor)) static void prepare(void) { pthread_atfork(NULL, NULL, after_fork); }

/* -- descriptors --------------------------------------------------------------------------------------------------- */

enum { DUPLICATE_FROM = 300, DUPFD_QUERY = 1027 /* Linux 6.10 */ };

static int duplicate(int fd) {
    int made = fcntl(fd, F_DUPFD_CLOEXEC, DUPLICATE_FROM);
    return made < 0 && errno == EINVAL ? fcntl(fd, F_DUPFD_CLOEXEC, 3) : made; /* beyond the limit of the process */
}

/* Whether two descriptors are certainly the same open file. */
static bool same_file(int fd, int other) {
    struct stat first, second;
    if (fstat(other, &second)) return false; /* closed */
    int answer = fcntl(fd, DUPFD_QUERY, other);
    if (answer >= 0) return answer;
    pid_t process = getpid();
    long order = syscall(SYS_kcmp, process, process, 0 /* KCMP_FILE */, (unsigned long)fd, (unsigned long)other);
    if (order >= 0) return !order;
    if (fstat(fd, &first)) return false;
    /* A memfd has an inode of its own; what is no regular file may share it with others. */
    return first.st_dev == second.st_dev && first.st_ino == second.st_ino && S_ISREG(second.st_mode) &&
           !second.st_nlink;
}

/* CUDA closes the descriptor of a successful import, and that of some failed ones (facts of its driver, measured). */
static cuda_error import_copy(void **made, const hip_memory_desc *desc) {
    hip_memory_desc copy = *desc;
    pthread_mutex_lock(&import_lock);
    cuda_error code = 2;
    copy.handle.fd = duplicate(desc->handle.fd);
    if (copy.handle.fd >= 0) {
        code = cuda.cuImportExternalMemory(made, &copy);
        if (code && same_file(desc->handle.fd, copy.handle.fd)) close(copy.handle.fd);
    }
    pthread_mutex_unlock(&import_lock);
    return code;
}

/* -- memory -------------------------------------------------------------------------------------------------------- */

enum { OPAQUE_FD = 1, D3D11_RESOURCE_KMT = 7, DEDICATED = 1 };

HIP_CALL(hipImportExternalMemory, (void **result, const hip_memory_desc *desc), (result, desc)) {
    NEED(result && desc && !(desc->flags & ~(uint32_t)DEDICATED));
    NEED(desc->type >= OPAQUE_FD && desc->type <= D3D11_RESOURCE_KMT && desc->handle.fd);
    ON_CURRENT;
    memory *made = calloc(1, sizeof *made);
    if (!made) return hipErrorOutOfMemory;
    /* HIP ignores the flag, and CUDA needs it where the exporter's allocation was dedicated: it goes on as it is. */
    hip_memory_desc copy = *desc;
    memset(copy.reserved, 0, sizeof copy.reserved);
    cuda_error code =
        desc->type == OPAQUE_FD ? import_copy(&made->cuda, &copy) : cuda.cuImportExternalMemory(&made->cuda, &copy);
    if (code) {
        free(made);
        return hipErrorOutOfMemory;
    }
    made->device = gfw_device;
    made->size = desc->size;
    pthread_mutex_lock(&lock);
    made->next = memories;
    memories = made;
    pthread_mutex_unlock(&lock);
    *result = made;
    return hipSuccess;
}

static memory *find_memory(const void *handle) {
    memory *it = memories;
    while (it && (it != handle || it->destroyed)) it = it->next;
    return it;
}

/* Out of the list when nothing needs it any more; CUDA's object is then to be destroyed. */
static void *end_memory(memory *it) {
    if (!it->destroyed || it->regions || it->arrays) return NULL;
    for (memory **link = &memories; *link; link = &(*link)->next) {
        if (*link != it) continue;
        *link = it->next;
        break;
    }
    void *object = it->cuda;
    free(it);
    return object;
}

HIP_CALL(hipDestroyExternalMemory, (void *handle), (handle)) {
    READY;
    pthread_mutex_lock(&lock);
    memory *found = find_memory(handle);
    void *object = NULL;
    int device = 0;
    if (found) {
        device = found->device;
        found->destroyed = true;
        object = end_memory(found);
    }
    pthread_mutex_unlock(&lock);
    NEED(found);
    if (!object) return hipSuccess;
    ON(device);
    CUDA(cuda.cuDestroyExternalMemory(object));
    return hipSuccess;
}

/* -- mapped buffers ------------------------------------------------------------------------------------------------ */

enum { PAGE = 4096 };

static bool add(uint64_t **list, size_t *count, size_t *room, uint64_t entry) {
    if (*count == *room) {
        size_t wanted = *room ? 2 * *room : 8;
        uint64_t *grown = realloc(*list, wanted * sizeof *grown);
        if (!grown) return false;
        *list = grown;
        *room = wanted;
    }
    (*list)[(*count)++] = entry;
    return true;
}

static cuda_error map_from_start(const memory *of, uint64_t size, uint64_t *base) {
    hip_buffer_desc desc = {.size = size};
    return cuda.cuExternalMemoryGetMappedBuffer(base, of->cuda, &desc);
}

static cuda_error unmap_region(const region *it) {
    cuda_error code = cuda.cuMemFree(it->base);
    if (code) return code;
    for (size_t i = 0; i < it->probe_count; i++) cuda.cuMemFree(it->probes[i]);
    return 0;
}

static void free_region(region *it) {
    free(it->pointers);
    free(it->probes);
    free(it);
}

/*
 * Map all of it. HIP takes a size beyond the object, and so does CUDA until that is mapped: then what the object really
 * has is found out, to a page.
 */
static hip_error map_whole(memory *of) {
    region *made = calloc(1, sizeof *made);
    if (!made) return hipErrorOutOfMemory;
    size_t room = 0;
    made->owner = of;
    made->extent = of->size;
    cuda_error code = map_from_start(of, of->size, &made->base);
    if (code == CUDA_INVALID_VALUE) {
        uint64_t low = 0, high = of->size;
        while (high - low > PAGE) {
            uint64_t middle = (low + (high - low) / 2 + PAGE - 1) / PAGE * PAGE, base;
            if (middle >= high) break;
            cuda_error answer = map_from_start(of, middle, &base);
            if (answer && answer != CUDA_INVALID_VALUE) {
                code = answer;
                break;
            }
            if (answer) {
                high = middle;
                continue;
            }
            low = middle;
            if (made->base && !add(&made->probes, &made->probe_count, &room, made->base)) {
                cuda.cuMemFree(made->base);
            }
            made->base = base;
            made->extent = low;
            code = 0;
        }
    }
    if (code) { /* also an error that says nothing of the size, behind a probe that fitted */
        if (made->base) unmap_region(made);
        free_region(made);
        return gfw_code(code);
    }
    made->next = regions;
    regions = made;
    of->current = made;
    of->regions++;
    return hipSuccess;
}

static bool has_pointer(const region *of, uint64_t address) {
    for (size_t i = 0; i < of->count; i++)
        if (of->pointers[i] == address) return true;
    return false;
}

static hip_error map_range(memory *of, const hip_buffer_desc *desc, void **pointer) {
    NEED(desc->size && desc->offset <= of->size && desc->size <= of->size - desc->offset);
    if (!of->current) {
        ON(of->device);
        TRY(map_whole(of));
    }
    region *from = of->current;
    uint64_t address = from->base + desc->offset;
    hip_error code = hipSuccess;
    if (desc->offset > from->extent || desc->size > from->extent - desc->offset) code = hipErrorInvalidValue;
    /* A second mapping from one offset is the same pointer, and can be freed once. */
    if (!code && !has_pointer(from, address) && !add(&from->pointers, &from->count, &from->room, address))
        code = hipErrorOutOfMemory;
    if (!code) *pointer = (void *)(uintptr_t)address;
    return code;
}

HIP_CALL(hipExternalMemoryGetMappedBuffer, (void **pointer, void *handle, const hip_buffer_desc *desc),
         (pointer, handle, desc)) {
    NEED(pointer && desc && !desc->flags);
    READY;
    pthread_mutex_lock(&lock);
    memory *of = find_memory(handle);
    hip_error code = of ? map_range(of, desc, pointer) : hipErrorInvalidValue;
    pthread_mutex_unlock(&lock);
    return code;
}

static region *find_pointer(uint64_t address, size_t *index) {
    for (region *it = regions; it; it = it->next)
        for (size_t i = 0; i < it->count; i++)
            if (it->pointers[i] == address) {
                *index = i;
                return it;
            }
    return NULL;
}

static bool is_inside(uint64_t address) {
    for (region *it = regions; it; it = it->next)
        if (address >= it->base && address - it->base < it->extent) return true;
    return false;
}

static void drop_region(region *it) {
    for (region **link = &regions; *link; link = &(*link)->next) {
        if (*link != it) continue;
        *link = it->next;
        break;
    }
    it->owner->regions--;
}

/* Both without the lock: they wait for the device, as a free does. */
static hip_error wait_for(int device) {
    ON(device);
    CUDA(cuda.cuCtxSynchronize());
    return hipSuccess;
}

static hip_error release(int device, const region *of) {
    ON(device);
    CUDA(unmap_region(of));
    return hipSuccess;
}

/* Whoever is the last of several frees, with no pointer left, unmaps the region: the others may still put theirs back. */
static hip_error free_mapped(region *of, size_t index, uint64_t address) {
    memory *owner = of->owner;
    int device = owner->device;
    hip_error code = hipSuccess;
    of->pointers[index] = of->pointers[--of->count];
    of->frees++;
    owner->regions++; /* neither goes while the lock is not held */
    bool last = !of->count && of->frees == 1;
    if (!last) {
        pthread_mutex_unlock(&lock);
        code = wait_for(device);
        pthread_mutex_lock(&lock);
        last = !code && !of->count && of->frees == 1;
    }
    if (last) {
        if (owner->current == of) owner->current = NULL; /* who maps now gets another one */
        pthread_mutex_unlock(&lock);
        code = release(device, of);
        pthread_mutex_lock(&lock);
    }
    of->frees--;
    owner->regions--;
    if (code) { /* it is still there: under a capture, for one */
        if (!has_pointer(of, address)) add(&of->pointers, &of->count, &of->room, address);
        if (!owner->current) owner->current = of;
    } else if (last) {
        drop_region(of);
        free_region(of);
    }
    void *object = end_memory(owner);
    pthread_mutex_unlock(&lock);
    if (object) {
        ON(device);
        cuda.cuDestroyExternalMemory(object);
    }
    return code;
}

HIP_CALL(hipFree, (void *pointer), (pointer)) {
    size_t index;
    READY;
    if (!pointer) return hipSuccess;
    pthread_mutex_lock(&lock);
    region *of = find_pointer((uintptr_t)pointer, &index);
    if (of) return free_mapped(of, index, (uintptr_t)pointer); /* unlocks */
    bool inside = is_inside((uintptr_t)pointer);
    pthread_mutex_unlock(&lock);
    if (inside) return hipErrorInvalidValue; /* freed before, or never given out */
    return gfw_free_plain(pointer);
}

/* -- mipmapped arrays ---------------------------------------------------------------------------------------------- */

#ifdef GIP_MIPMAP /* AMD's library for Linux does not export it (ROCm/hip #3779) */
enum { SIGNED, UNSIGNED, FLOAT };
enum { LAYERED = 1, CUBE = 4, KNOWN_ARRAY_FLAGS = 0xf }; /* and surface, gather: CUDA has the same bits */

/* As many channels of one width as come first; CUarray_format. */
static hip_error take_format(const hip_channels *from, cuda_array_desc *to) {
    static const uint32_t formats[3][3] = {{0x08, 0x09, 0x0a}, {0x01, 0x02, 0x03}, {0, 0x10, 0x20}};
    const int bits[] = {from->x, from->y, from->z, from->w};
    uint32_t count = 0;
    while (count < 4 && bits[count]) count++;
    for (uint32_t i = 0; i < 4; i++) NEED(i < count ? bits[i] == bits[0] : !bits[i]);
    int width = bits[0] == 8 ? 0 : bits[0] == 16 ? 1 : bits[0] == 32 ? 2 : -1;
    NEED(count && count != 3 && width >= 0 && from->kind <= FLOAT && formats[from->kind][width]);
    to->format = formats[from->kind][width];
    to->channels = count;
    return hipSuccess;
}

/*
 * NVIDIA's two drivers place the layers of an image alike only when CUDA is told every level that such an image can have
 * (measured: 580.159.04, an H200). HIP is told how many there are, and so is whoever asks for a level.
 */
static uint32_t levels_for_cuda(const hip_mipmap_desc *desc) {
    size_t longest = desc->extent.width > desc->extent.height ? desc->extent.width : desc->extent.height;
    uint32_t all = 1;
    while (longest >> all) all++;
    bool is_layered = desc->flags & (LAYERED | CUBE) && desc->extent.depth > 1;
    return is_layered && desc->levels > 1 && desc->levels < all ? all : desc->levels;
}

static hip_error map_array(memory *of, const hip_mipmap_desc *desc, void **result) {
    cuda_mipmap_desc made = {.offset = desc->offset,
                             .array = {.width = desc->extent.width,
                                       .height = desc->extent.height,
                                       .depth = desc->extent.depth,
                                       .flags = desc->flags},
                             .levels = levels_for_cuda(desc)};
    TRY(take_format(&desc->format, &made.array));
    ON(of->device);
    array *it = calloc(1, sizeof *it);
    if (!it) return hipErrorOutOfMemory;
    cuda_error code = cuda.cuExternalMemoryGetMappedMipmappedArray(&it->cuda, of->cuda, &made);
    if (code) {
        free(it);
        return gfw_code(code);
    }
    it->owner = of;
    it->levels = desc->levels;
    of->arrays++;
    it->next = arrays;
    arrays = it;
    *result = it->cuda;
    return hipSuccess;
}

HIP_CALL(hipExternalMemoryGetMappedMipmappedArray, (void **result, void *handle, const hip_mipmap_desc *desc),
         (result, handle, desc)) {
    NEED(result && desc && desc->levels && !(desc->flags & ~(uint32_t)KNOWN_ARRAY_FLAGS));
    READY;
    pthread_mutex_lock(&lock);
    memory *of = find_memory(handle);
    hip_error code = of ? map_array(of, desc, result) : hipErrorInvalidValue;
    pthread_mutex_unlock(&lock);
    return code;
}
#endif

static hip_error get_level(void **level, void *from, uint32_t number) {
    bool beyond = false;
    NEED(level && from);
    pthread_mutex_lock(&lock);
    for (array *it = arrays; it; it = it->next) beyond |= it->cuda == from && number >= it->levels;
    pthread_mutex_unlock(&lock);
    NEED(!beyond);
    ON_CURRENT;
    CUDA(cuda.cuMipmappedArrayGetLevel(level, from, number));
    return hipSuccess;
}

HIP_CALL(hipGetMipmappedArrayLevel, (void **level, void *from, uint32_t number), (level, from, number)) {
    return get_level(level, from, number);
}

static hip_error destroy_array(void *which) {
    void *object = NULL;
    int device = gfw_device;
    NEED(which);
    {
        ON_CURRENT;
        CUDA(cuda.cuMipmappedArrayDestroy(which));
    }
    pthread_mutex_lock(&lock);
    for (array **link = &arrays; *link; link = &(*link)->next) {
        array *it = *link;
        if (it->cuda != which) continue;
        *link = it->next;
        it->owner->arrays--;
        device = it->owner->device;
        object = end_memory(it->owner);
        free(it);
        break;
    }
    pthread_mutex_unlock(&lock);
    if (object) {
        ON(device);
        cuda.cuDestroyExternalMemory(object);
    }
    return hipSuccess;
}

HIP_CALL(hipFreeMipmappedArray, (void *which), (which)) { return destroy_array(which); }
