/* Calls and frames in C, through the drivers' functions and structs that Python has made. It needs no driver's header.
 * Each function returns 0, or 1 as soon as a call fails.
 */
#include <stdint.h>
#include <unistd.h>

struct compute { /* a signal or a wait */
    int (*call)(void *const *semaphores, const void *params, unsigned count, void *stream);
    void *semaphore;
    const void *params;
    uint64_t *value;
    void *stream;
};

struct graphics { /* a submission, and the values that it waits for and signals */
    int (*submit)(void *queue, uint32_t count, const void *infos, void *fence);
    void *queue;
    const void *info;
    uint64_t *wait, *signal;
};

struct memory {
    int (*import)(void **memory, const void *desc);
    const void *desc;
    int *fd;
    int (*map)(uint64_t *address, void *memory, const void *range);
    const void *range;
    int (*unmap)(uint64_t address);
    int (*destroy)(void *memory);
};

static int call(const struct compute *it, uint64_t value)
{
    *it->value = value;
    return it->call(&it->semaphore, it->params, 1, it->stream) != 0;
}

int calls(const struct compute *it, uint64_t value, uint64_t step, uint64_t count)
{
    int failed = 0;
    for (; count && !failed; count--, value += step)
        failed = call(it, value);
    return failed;
}

/* Frame k waits in Vulkan for `value` and signals value + 1; the compute side waits for that and signals value + 2. */
int frames(const struct graphics *graphics, const struct compute *wait, const struct compute *signal, uint64_t value,
           uint64_t count)
{
    int failed = 0;
    for (; count && !failed; count--, value += 2) {
        *graphics->wait = value;
        *graphics->signal = value + 1;
        failed = graphics->submit(graphics->queue, 1, graphics->info, 0) || call(wait, value + 1) ||
                 call(signal, value + 2);
    }
    return failed;
}

/* Imports, maps and closes memories; an import uses a duplicate of `fd`, which the driver closes. */
int memories(const struct memory *it, int fd, uint64_t count)
{
    int failed = 0;
    for (; count && !failed; count--) {
        void *memory = 0;
        uint64_t address = 0;
        *it->fd = dup(fd);
        failed = it->import(&memory, it->desc) || it->map(&address, memory, it->range) || it->unmap(address) ||
                 it->destroy(memory);
    }
    return failed;
}
