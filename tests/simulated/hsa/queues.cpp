/* Code objects, in which a kernel is its name; and queues, which run the kernels that AMD's runtime has of its own. */
#include "stand_in.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <thread>

struct Kernel {
    std::string name;
};
static std::mutex kernels_lock;
static std::map<std::string, Kernel *> kernels;

extern "C" {

hsa_status_t hsa_code_object_reader_create_from_memory(const void *, size_t, hsa_code_object_reader_t *out) {
    out->handle = 1;
    return OK;
}
hsa_status_t hsa_code_object_reader_destroy(hsa_code_object_reader_t) { return OK; }
hsa_status_t hsa_executable_create_alt(hsa_profile_t, hsa_default_float_rounding_mode_t, const char *,
                                       hsa_executable_t *out) {
    out->handle = 1;
    return OK;
}
hsa_status_t hsa_executable_destroy(hsa_executable_t) { return OK; }
hsa_status_t hsa_executable_freeze(hsa_executable_t, const char *) { return OK; }
hsa_status_t hsa_executable_load_agent_code_object(hsa_executable_t, hsa_agent_t, hsa_code_object_reader_t,
                                                   const char *, hsa_loaded_code_object_t *out) {
    if (out)
        out->handle = 1;
    return OK;
}
hsa_status_t hsa_executable_agent_global_variable_define(hsa_executable_t, hsa_agent_t, const char *, void *) {
    return OK;
}
hsa_status_t hsa_executable_get_symbol_by_name(hsa_executable_t, const char *name, const hsa_agent_t *,
                                               hsa_executable_symbol_t *out) {
    size_t n = strlen(name);
    if (n < 4 || strcmp(name + n - 3, ".kd"))
        return HSA_STATUS_ERROR_INVALID_SYMBOL_NAME;
    std::string key(name, n - 3);
    std::lock_guard<std::mutex> held(kernels_lock);
    Kernel *&k = kernels[key];
    if (!k)
        k = new Kernel{key};
    out->handle = (uint64_t)k;
    return OK;
}
hsa_status_t hsa_executable_symbol_get_info(hsa_executable_symbol_t s, hsa_executable_symbol_info_t what, void *value) {
    switch ((int)what) {
    case HSA_EXECUTABLE_SYMBOL_INFO_KERNEL_OBJECT: *(uint64_t *)value = s.handle; return OK;
    case HSA_EXECUTABLE_SYMBOL_INFO_KERNEL_DYNAMIC_CALLSTACK: *(bool *)value = false; return OK;
    case HSA_EXECUTABLE_SYMBOL_INFO_TYPE: *(hsa_symbol_kind_t *)value = HSA_SYMBOL_KIND_KERNEL; return OK;
    default: return BAD;
    }
}
hsa_status_t hsa_executable_iterate_symbols(hsa_executable_t,
                                            hsa_status_t (*)(hsa_executable_t, hsa_executable_symbol_t, void *),
                                            void *) {
    return OK;
}
}

struct Queue {
    amd_queue_t amd; // first: clr looks behind the hsa_queue_t
    std::atomic<uint64_t> write{0}, read{0};
    std::atomic<bool> stop{false};
    std::thread thread;
    void (*callback)(hsa_status_t, hsa_queue_t *, void *);
    void *data;
};
template <class T> T take(const char *&at) {
    at = (const char *)(((uintptr_t)at + alignof(T) - 1) / alignof(T) * alignof(T));
    T v;
    memcpy(&v, at, sizeof v);
    at += sizeof v;
    return v;
}
struct alignas(32) Four {
    uint64_t x, y, z, w;
};
typedef std::atomic<uint32_t> W32;
typedef std::atomic<uint64_t> W64;

static bool run(Queue &queue, const hsa_kernel_dispatch_packet_t &packet) {
    const std::string &name = ((Kernel *)packet.kernel_object)->name;
    const char *a = (const char *)packet.kernarg_address;
    say("kernel %s, grid %u %u %u", name.c_str(), packet.grid_size_x, packet.grid_size_y, packet.grid_size_z);
    if (name == "__amd_rocclr_fillBufferAligned") {
        char *p = take<char *>(a);
        const char *pattern = take<const char *>(a);
        size_t size = take<uint32_t>(a), unit = take<uint32_t>(a);
        uint64_t end = take<uint64_t>(a);
        size *= unit;
        for (; (uint64_t)p < end; p += size)
            memcpy(p, pattern, size);
        return true;
    }
    if (name == "__amd_rocclr_copyBuffer") {
        const char *from = take<const char *>(a);
        char *to = take<char *>(a);
        uint64_t size = take<uint64_t>(a);
        memmove(to, from, size);
        return true;
    }
    if (name == "__amd_rocclr_copyBufferAligned") {
        const char *from = take<const char *>(a);
        char *to = take<char *>(a);
        uint64_t f = take<uint64_t>(a), t = take<uint64_t>(a), n = take<uint64_t>(a),
                 unit = take<uint32_t>(a) == 16 ? 16 : 4;
        memmove(to + t * unit, from + f * unit, n * unit);
        return true;
    }
    if (name == "__amd_rocclr_copyBufferRect" || name == "__amd_rocclr_copyBufferRectAligned") {
        const char *from = take<const char *>(a);
        char *to = take<char *>(a);
        Four f = take<Four>(a), t = take<Four>(a), n = take<Four>(a);
        uint64_t unit = n.w == 16 ? 16 : n.w == 4 ? 4 : 1;
        for (uint64_t z = 0; z < n.z; ++z)
            for (uint64_t y = 0; y < n.y; ++y)
                memmove(to + (t.z + y * t.x + z * t.y) * unit, from + (f.z + y * f.x + z * f.y) * unit, n.x * unit);
        return true;
    }
    if (name == "__amd_rocclr_fillBufferAligned2D") {
        char *p[4];
        for (auto &one : p)
            one = take<char *>(a);
        const char *pattern = take<const char *>(a);
        size_t size = take<uint32_t>(a);
        uint64_t at = take<uint64_t>(a), width = take<uint64_t>(a), height = take<uint64_t>(a),
                 pitch = take<uint64_t>(a);
        int k = p[3] ? 3 : p[2] ? 2 : p[1] ? 1 : 0;
        size_t unit = 1u << k;
        for (uint64_t y = 0; y < height; ++y)
            for (uint64_t x = 0; x < width; ++x)
                memcpy(p[k] + (at + y * pitch + x * size) * unit, pattern, size * unit);
        return true;
    }
    if (name == "__amd_rocclr_streamOpsWrite") {
        W32 *w32 = take<W32 *>(a);
        W64 *w64 = take<W64 *>(a);
        uint64_t v = take<uint64_t>(a);
        if (w32)
            w32->store((uint32_t)v);
        else
            w64->store(v);
        return true;
    }
    if (name == "__amd_rocclr_streamOpsWait") {
        W32 *w32 = take<W32 *>(a);
        W64 *w64 = take<W64 *>(a);
        uint64_t v = take<uint64_t>(a), how = take<uint64_t>(a), mask = take<uint64_t>(a);
        if (w32) {
            v = (uint32_t)v;
            how = (uint32_t)how;
            mask = (uint32_t)mask;
        }
        unsigned turns = 0;
        while (!queue.stop) { // as __amd_streamOpsWait of the device libraries: unsigned, no order but the comparison
            uint64_t seen = w32 ? w32->load(std::memory_order_relaxed) : w64->load(std::memory_order_relaxed);
            bool go = how == 0   ? (seen & mask) >= v
                      : how == 1 ? (seen & mask) == v
                      : how == 2 ? (seen & mask & v) != 0
                      : how == 3 ? ((seen | v) & mask) != mask
                                 : true;
            if (go)
                break;
            nap(turns);
        }
        return true;
    }
    if (name == "__amd_rocclr_initHeap" || name == "__amd_rocclr_gwsInit")
        return true;
    fprintf(stderr, "[stand-in] no kernel of the name %s\n", name.c_str());
    return false;
}
static void await(Queue &queue, hsa_signal_t s, hsa_signal_condition_t c, int64_t want, int64_t mask) {
    unsigned turns = 0;
    while (s.handle && !queue.stop && !is_met(value_of(s) & mask, c, want))
        nap(turns);
}
static void process(Queue *q) {
    const uint32_t mask = q->amd.hsa_queue.size - 1;
    char *ring = (char *)q->amd.hsa_queue.base_address;
    unsigned turns = 0;
    while (!q->stop) {
        uint64_t index = q->read.load();
        char *at = ring + (index & mask) * 64;
        uint16_t header = __atomic_load_n((uint16_t *)at, __ATOMIC_ACQUIRE), type = header & 0xff;
        if (index >= q->write || type == HSA_PACKET_TYPE_INVALID) {
            nap(turns);
            continue;
        }
        turns = 0;
        alignas(64) char copy[64];
        memcpy(copy, at, 64);
        hsa_signal_t done{0};
        uint64_t start = now();
        bool good = true;
        if (type == HSA_PACKET_TYPE_KERNEL_DISPATCH) {
            auto &p = *(hsa_kernel_dispatch_packet_t *)copy;
            done = p.completion_signal;
            good = run(*q, p);
        } else if (type == HSA_PACKET_TYPE_BARRIER_AND) {
            auto &p = *(hsa_barrier_and_packet_t *)copy;
            done = p.completion_signal;
            for (auto s : p.dep_signal)
                await(*q, s, HSA_SIGNAL_CONDITION_EQ, 0, -1);
        } else if (type == HSA_PACKET_TYPE_VENDOR_SPECIFIC && copy[2] == HSA_AMD_PACKET_TYPE_BARRIER_VALUE) {
            auto &p = *(hsa_amd_barrier_value_packet_t *)copy;
            done = p.completion_signal;
            await(*q, p.signal, (hsa_signal_condition_t)p.cond, p.value, p.mask);
        } else {
            fprintf(stderr, "[stand-in] packet header 0x%x?\n", header);
            good = false;
        }
        __atomic_store_n((uint16_t *)at, (uint16_t)HSA_PACKET_TYPE_INVALID, __ATOMIC_RELEASE);
        q->read = index + 1;
        if (!good)
            q->callback(HSA_STATUS_ERROR_INVALID_CODE_OBJECT, &q->amd.hsa_queue, q->data);
        complete(done, start);
    }
}
static std::atomic<int64_t> queues{0};
int64_t count_queues() { return queues; }

extern "C" {

hsa_status_t hsa_queue_create(hsa_agent_t, uint32_t size, hsa_queue_type32_t type,
                              void (*callback)(hsa_status_t, hsa_queue_t *, void *), void *data, uint32_t, uint32_t,
                              hsa_queue_t **out) {
    static std::atomic<uint64_t> ids{1};
    if (!size || size & (size - 1))
        return BAD;
    FAIL_IF_ASKED;
    Queue *q = new (std::align_val_t(64)) Queue;
    memset((void *)&q->amd, 0, sizeof q->amd);
    q->callback = callback;
    q->data = data;
    char *ring = (char *)aligned_alloc(4096, size * 64ul < 4096 ? 4096 : size * 64ul);
    for (uint32_t i = 0; i < size; ++i) {
        memset(ring + i * 64ul, 0, 64);
        *(uint16_t *)(ring + i * 64ul) = HSA_PACKET_TYPE_INVALID;
    }
    q->amd.hsa_queue.type = type;
    q->amd.hsa_queue.size = size;
    q->amd.hsa_queue.base_address = ring;
    q->amd.hsa_queue.id = ids++;
    hsa_signal_create(0, 0, nullptr, &q->amd.hsa_queue.doorbell_signal);
    q->thread = std::thread(process, q);
    say("queue %lu of %u", q->amd.hsa_queue.id, size);
    ++queues;
    *out = &q->amd.hsa_queue;
    return OK;
}
static Queue *of(const hsa_queue_t *queue) { return (Queue *)queue; }
hsa_status_t hsa_queue_destroy(hsa_queue_t *queue) {
    Queue *q = of(queue);
    say("queue %lu destroyed", queue->id);
    q->stop = true;
    q->thread.join();
    free(queue->base_address);
    q->~Queue();
    operator delete(q, std::align_val_t(64));
    --queues;
    return OK;
}
uint64_t hsa_queue_add_write_index_screlease(const hsa_queue_t *q, uint64_t n) { return of(q)->write.fetch_add(n); }
uint64_t hsa_queue_load_read_index_relaxed(const hsa_queue_t *q) { return of(q)->read; }
uint64_t hsa_queue_load_read_index_scacquire(const hsa_queue_t *q) { return of(q)->read; }
uint64_t hsa_queue_load_write_index_relaxed(const hsa_queue_t *q) { return of(q)->write; }
hsa_status_t hsa_amd_queue_set_priority(hsa_queue_t *, hsa_amd_queue_priority_t) { return OK; }
hsa_status_t hsa_amd_queue_cu_set_mask(const hsa_queue_t *, uint32_t, const uint32_t *) { return OK; }
}
