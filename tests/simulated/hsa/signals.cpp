/* Signals, who waits for them, and copies, which begin when signals are done and end in one. */
#include "stand_in.h"

#include <cstdlib>
#include <cstring>
#include <list>
#include <thread>
#include <vector>

amd_signal_t *signal_of(hsa_signal_t s) { return (amd_signal_t *)s.handle; }
std::atomic<int64_t> &value_of(hsa_signal_t s) { return *(std::atomic<int64_t> *)&signal_of(s)->value; }
bool is_met(int64_t v, hsa_signal_condition_t c, int64_t want) {
    switch (c) {
    case HSA_SIGNAL_CONDITION_EQ: return v == want;
    case HSA_SIGNAL_CONDITION_NE: return v != want;
    case HSA_SIGNAL_CONDITION_LT: return v < want;
    default: return v >= want;
    }
}

void complete(hsa_signal_t s, uint64_t start) {
    if (!s.handle)
        return;
    signal_of(s)->start_ts = start;
    signal_of(s)->end_ts = now();
    value_of(s) -= 1;
}

extern "C" {

hsa_status_t hsa_signal_create(hsa_signal_value_t value, uint32_t, const hsa_agent_t *, hsa_signal_t *out) {
    amd_signal_t *s = (amd_signal_t *)aligned_alloc(64, (sizeof(amd_signal_t) + 63) / 64 * 64);
    memset((void *)s, 0, sizeof *s);
    s->kind = AMD_SIGNAL_KIND_USER;
    *(int64_t *)&s->value = value;
    out->handle = (uint64_t)s;
    return OK;
}
hsa_status_t hsa_amd_signal_create(hsa_signal_value_t value, uint32_t n, const hsa_agent_t *who, uint64_t,
                                   hsa_signal_t *out) {
    return hsa_signal_create(value, n, who, out);
}
hsa_status_t hsa_signal_destroy(hsa_signal_t s) {
    (void)s;
    return OK;
} // kept: a late reader does no harm, 64 bytes do little
hsa_status_t hsa_amd_signal_value_pointer(hsa_signal_t s, volatile hsa_signal_value_t **p) {
    *p = (volatile hsa_signal_value_t *)&signal_of(s)->value;
    return OK;
}
hsa_signal_value_t hsa_signal_load_relaxed(hsa_signal_t s) { return value_of(s).load(); }
void hsa_signal_silent_store_relaxed(hsa_signal_t s, hsa_signal_value_t v) { value_of(s).store(v); }
void hsa_signal_store_relaxed(hsa_signal_t s, hsa_signal_value_t v) { value_of(s).store(v); }
void hsa_signal_store_screlease(hsa_signal_t s, hsa_signal_value_t v) { value_of(s).store(v); }
void hsa_signal_add_relaxed(hsa_signal_t s, hsa_signal_value_t v) { value_of(s) += v; }
void hsa_signal_subtract_relaxed(hsa_signal_t s, hsa_signal_value_t v) { value_of(s) -= v; }
hsa_signal_value_t hsa_signal_wait_scacquire(hsa_signal_t s, hsa_signal_condition_t c, hsa_signal_value_t want,
                                             uint64_t timeout, hsa_wait_state_t) {
    uint64_t start = now();
    unsigned turns = 0;
    for (;;) {
        int64_t v = value_of(s).load();
        if (is_met(v, c, want) || (timeout != UINT64_MAX && now() - start > timeout))
            return v;
        nap(turns);
    }
}
struct Waiter {
    hsa_signal_t signal;
    hsa_signal_condition_t condition;
    int64_t want;
    hsa_amd_signal_handler handler;
    void *arg;
};
static std::mutex &waiters_lock() {
    static auto *m = new std::mutex;
    return *m;
}
static std::list<Waiter> &waiters() {
    static auto *l = new std::list<Waiter>;
    return *l;
}
static void watch() {
    unsigned turns = 0;
    for (;;) {
        std::list<Waiter> due;
        {
            std::lock_guard<std::mutex> held(waiters_lock());
            for (auto it = waiters().begin(); it != waiters().end();) {
                auto next = std::next(it);
                if (is_met(value_of(it->signal), it->condition, it->want))
                    due.splice(due.end(), waiters(), it);
                it = next;
            }
        }
        if (due.empty()) {
            nap(turns);
            continue;
        }
        turns = 0;
        for (Waiter &one : due) {
            bool again = one.handler(value_of(one.signal), one.arg);
            if (again) {
                std::lock_guard<std::mutex> held(waiters_lock());
                waiters().push_back(one);
            }
        }
    }
}
hsa_status_t hsa_amd_signal_async_handler(hsa_signal_t s, hsa_signal_condition_t c, hsa_signal_value_t want,
                                          hsa_amd_signal_handler handler, void *arg) {
    static std::once_flag once;
    std::call_once(once, [] { std::thread(watch).detach(); });
    std::lock_guard<std::mutex> held(waiters_lock());
    waiters().push_back(Waiter{s, c, want, handler, arg});
    return OK;
}
}

/* -- copies */

template <class Work>
static hsa_status_t later(uint32_t count, const hsa_signal_t *deps, hsa_signal_t done, Work work) {
    std::vector<hsa_signal_t> after(deps, deps + count);
    bool ready = true;
    for (auto s : after)
        ready &= value_of(s) == 0;
    auto all = [=] {
        unsigned turns = 0;
        for (auto s : after)
            while (value_of(s) != 0)
                nap(turns);
        uint64_t start = now();
        work();
        complete(done, start);
    };
    if (ready)
        all();
    else
        std::thread(all).detach();
    return OK;
}

extern "C" {

hsa_status_t hsa_amd_memory_async_copy(void *to, hsa_agent_t, const void *from, hsa_agent_t, size_t size, uint32_t n,
                                       const hsa_signal_t *deps, hsa_signal_t done) {
    say("copy %p <- %p + 0x%zx", to, from, size);
    return later(n, deps, done, [=] { memmove(to, from, size); });
}
hsa_status_t hsa_amd_memory_async_copy_on_engine(void *to, hsa_agent_t a, const void *from, hsa_agent_t b, size_t size,
                                                 uint32_t n, const hsa_signal_t *deps, hsa_signal_t done,
                                                 hsa_amd_sdma_engine_id_t, bool) {
    return hsa_amd_memory_async_copy(to, a, from, b, size, n, deps, done);
}
hsa_status_t hsa_amd_memory_copy_engine_status(hsa_agent_t, hsa_agent_t, uint32_t *mask) {
    *mask = 3;
    return OK;
}
hsa_status_t hsa_amd_memory_get_preferred_copy_engine(hsa_agent_t, hsa_agent_t, uint32_t *mask) {
    *mask = 0; // none: any that is free
    return OK;
}
hsa_status_t hsa_amd_memory_async_copy_rect(const hsa_pitched_ptr_t *to, const hsa_dim3_t *to_at,
                                            const hsa_pitched_ptr_t *from, const hsa_dim3_t *from_at,
                                            const hsa_dim3_t *range, hsa_agent_t, hsa_amd_copy_direction_t, uint32_t n,
                                            const hsa_signal_t *deps, hsa_signal_t done) {
    hsa_pitched_ptr_t t = *to, f = *from;
    hsa_dim3_t ta = *to_at, fa = *from_at, r = *range;
    return later(n, deps, done, [=] {
        for (uint32_t z = 0; z < r.z; ++z)
            for (uint32_t y = 0; y < r.y; ++y)
                memmove((char *)t.base + (ta.z + z) * t.slice + (ta.y + y) * t.pitch + ta.x,
                        (char *)f.base + (fa.z + z) * f.slice + (fa.y + y) * f.pitch + fa.x, r.x);
    });
}
hsa_status_t hsa_amd_profiling_async_copy_enable(bool) { return OK; }
hsa_status_t hsa_amd_profiling_set_profiler_enabled(hsa_queue_t *, int) { return OK; }
hsa_status_t hsa_amd_profiling_get_async_copy_time(hsa_signal_t s, hsa_amd_profiling_async_copy_time_t *t) {
    t->start = signal_of(s)->start_ts;
    t->end = signal_of(s)->end_ts;
    return OK;
}
hsa_status_t hsa_amd_profiling_get_dispatch_time(hsa_agent_t, hsa_signal_t s, hsa_amd_profiling_dispatch_time_t *t) {
    t->start = signal_of(s)->start_ts;
    t->end = signal_of(s)->end_ts;
    return OK;
}
}
