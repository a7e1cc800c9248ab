/* The baseline: frames and calls in C, through the drivers' functions and structs that Python has made.
 *
 * It needs no driver's header. Timelines: frame k waits in Vulkan for `value` and signals value + 1; the compute side
 * waits for that and signals value + 2.
 */
#include <stddef.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

typedef int (*submit_call)(void *queue, uint32_t count, const void *infos, void *fence);
typedef int (*counter_call)(void *device, void *semaphore, uint64_t *value);
typedef int (*compute_call)(void *const *semaphores, const void *params, unsigned count, void *stream);

struct compute {
    compute_call call;
    void *semaphore;
    const void *params;
    uint64_t *value;
    void *stream;
};

struct graphics {
    submit_call submit;
    void *queue;
    const void *info;
    uint64_t *waits, *signals;
    counter_call counter;
    void *device;
    void *semaphore;
};

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec / 1e3;
}

static int call(const struct compute *it, uint64_t value)
{
    *it->value = value;
    return it->call(&it->semaphore, it->params, 1, it->stream);
}

/* Makes `count` calls; returns the first status that is not 0. */
int calls(const struct compute *it, uint64_t value, uint64_t step, uint64_t count)
{
    for (; count; count--, value += step) {
        int status = call(it, value);
        if (status)
            return status;
    }
    return 0;
}

static int reach(const struct graphics *it, uint64_t value)
{
    uint64_t found = 0;
    double begun = now();
    while (found < value) {
        int status = it->counter(it->device, it->semaphore, &found);
        if (status)
            return status;
        if (found < value && now() - begun > 10e6)
            return -1; /* ten seconds: a signal was lost */
    }
    return 0;
}

/* Runs frames until the last one's work is done. */
int frames(const struct graphics *graphics, const struct compute *wait, const struct compute *signal, uint64_t value,
           uint64_t count)
{
    for (; count; count--, value += 2) {
        *graphics->waits = value;
        *graphics->signals = value + 1;
        int status = graphics->submit(graphics->queue, 1, graphics->info, NULL);
        if (!status)
            status = call(wait, value + 1);
        if (!status)
            status = call(signal, value + 2);
        if (status)
            return status;
    }
    return reach(graphics, value);
}

typedef int (*set_call)(void *executable, void *node, const void *params);

struct node {
    set_call call;
    void *executable;
    void *node;
    const void *params;
    uint64_t *value;
};

struct launch {
    int (*call)(void *executable, void *stream);
    void *executable;
    void *stream;
};

static int set(const struct node *it, uint64_t value)
{
    *it->value = value;
    return it->call(it->executable, it->node, it->params);
}

/* The same frames, but the compute side launches a graph whose values are set before each launch. */
int launches(const struct graphics *graphics, const struct node *wait, const struct node *signal,
             const struct launch *launch, uint64_t value, uint64_t count)
{
    for (; count; count--, value += 2) {
        *graphics->waits = value;
        *graphics->signals = value + 1;
        int status = graphics->submit(graphics->queue, 1, graphics->info, NULL);
        if (!status)
            status = set(wait, value + 1);
        if (!status)
            status = set(signal, value + 2);
        if (!status)
            status = launch->call(launch->executable, launch->stream);
        if (status)
            return status;
    }
    return reach(graphics, value);
}

struct memory {
    int (*import)(void **memory, const void *desc);
    const void *desc;
    int *fd;
    int (*map)(uint64_t *address, void *memory, const void *range);
    const void *range;
    int (*unmap)(uint64_t address);
    int (*destroy)(void *memory);
};

/* Imports, maps and releases `count` memories; an import uses a duplicate of `fd`, which the driver closes.
 * Returns the first status that is not 0. */
int memories(const struct memory *it, int fd, uint64_t count)
{
    for (; count; count--) {
        void *memory = NULL;
        uint64_t address = 0;
        *it->fd = dup(fd);
        int status = it->import(&memory, it->desc);
        if (!status)
            status = it->map(&address, memory, it->range);
        if (!status)
            status = it->unmap(address);
        if (!status)
            status = it->destroy(memory);
        if (status)
            return status;
    }
    return 0;
}
