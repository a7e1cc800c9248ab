/*
 * Semaphores in shared pages: binary ones in SwiftShader's layout (backends/gpuinterop_host/formats/swiftshader.py),
 * timelines in the layout of gpuinterop/timeline.py with a different magic number: a driver accepts a driver's
 * semaphores, and refuses the page of gpuinterop.timeline as it refuses any memfd.
 *
 * A binary wait polls the page without the lock, with growing pauses, and locks only to consume the signal. A
 * process that is killed while it sleeps on the condition leaves a waiter there, and the peer's next broadcast fails.
 */
#define _GNU_SOURCE
#include "gis.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define COND sizeof(pthread_mutex_t)
#define REFERENCES (sizeof(pthread_mutex_t) + sizeof(pthread_cond_t))
#define SIGNALED (REFERENCES + 4)

#define MAGIC "GIPTLSMD"
#define VERSION 8
#define SEQUENCE 12
#define VALUE 16

#define KIND 16 /* where glibc stores a mutex's kind */
#define KIND_SHARED 0x80

/* Holders need microseconds: one that takes longer was killed. A GPU's semaphore has no lock, and still works then. */
#define LOCK_SECONDS 1.0

static pthread_mutex_t *mutex_of(const gis_semaphore *it) { return (pthread_mutex_t *)it->page; }

static size_t page_size(void) { return (size_t)sysconf(_SC_PAGESIZE); }

static bool take_lock(pthread_mutex_t *mutex, double seconds) {
    struct timespec until;
    gis_deadline(&until, seconds);
    int code = pthread_mutex_trylock(mutex);
    if (code == EBUSY) code = pthread_mutex_clocklock(mutex, CLOCK_MONOTONIC, &until);
    return code == 0;
}

/* Open a descriptor's file again: the new description's flock excludes all others'. */
static int open_anew(int fd) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return open(path, O_RDWR | O_CLOEXEC);
}

/* Take a timeline's lock: unlock and close the result to release it; -1 if it cannot be taken. */
static int lock_file(const gis_semaphore *it) {
    struct timespec pause = {0, 50000};
    int fd = open_anew(it->file);
    for (double left = LOCK_SECONDS; fd >= 0 && flock(fd, LOCK_EX | LOCK_NB); left -= 50e-6) {
        if (left <= 0) {
            close(fd);
            return -1;
        }
        nanosleep(&pause, NULL);
    }
    return fd;
}

static int32_t word_at(const uint8_t *page, size_t offset) {
    int32_t word;
    memcpy(&word, page + offset, sizeof word);
    return word;
}

static bool is_timeline(const uint8_t *page) {
    return !memcmp(page, MAGIC, 8) && word_at(page, VERSION) == 2;
}

static bool is_binary(const uint8_t *page) {
    int32_t references = word_at(page, REFERENCES);
    return word_at(page, KIND) == KIND_SHARED && references >= 0 && references < 1 << 24 && page[SIGNALED] <= 1;
}

static void finish_semaphore(gis_object *object) {
    gis_semaphore *it = (gis_semaphore *)object;
    if (it->file >= 0) close(it->file);
    if (!it->page) return;
    if (it->kind == GIS_BINARY && take_lock(mutex_of(it), 0)) {
        --*(int32_t *)(it->page + REFERENCES);
        pthread_mutex_unlock(mutex_of(it));
    }
    munmap(it->page, page_size());
}

gis_status gis_make_semaphore(gis_context *context, gis_semaphore_kind kind, gis_semaphore **semaphore) {
    gis_semaphore *it =
        gis_new(GIS_EXTERNAL_SEMAPHORE, sizeof *it, context, context->object.device, finish_semaphore);
    it->kind = kind;
    it->file = -1;
    *semaphore = it;
    return GIS_OK;
}

typedef enum { OTHER, BINARY_PAGE, TIMELINE_PAGE, MEMORY } content;

static content look_at(int fd, const uint8_t *page) {
    char path[64], link[256];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(path, link, sizeof link - 1);
    if (length <= 0) return OTHER;
    link[length] = 0;
    if (strncmp(link, "/memfd:", 7)) return OTHER;
    const char *name = link + 7;
    static const char *const pages[] = {"SwiftShader.Semaphore.", "gpuinterop.exporter.binary", "gpuinterop.binary",
                                        "gpuinterop.exporter.timeline"};
    static const char *const memory[] = {"SwiftShader.Memory.", "gpuinterop.exporter.memory",
                                         "gpuinterop.simulated.vmm."};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
        if (!strncmp(name, memory[i], strlen(memory[i]))) return MEMORY;
    for (size_t i = 0; page && i < sizeof pages / sizeof *pages; i++) {
        if (strncmp(name, pages[i], strlen(pages[i]))) continue;
        if (i < 3) return is_binary(page) ? BINARY_PAGE : OTHER;
        return is_timeline(page) ? TIMELINE_PAGE : OTHER;
    }
    return OTHER;
}

gis_status gis_import_semaphore(gis_context *context, int fd, bool timeline, gis_semaphore **semaphore) {
    struct stat status;
    if (fstat(fd, &status)) return GIS_INVALID_VALUE;
    uint8_t *page = NULL;
    if (status.st_size == (off_t)page_size()) {
        void *found = mmap(NULL, page_size(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (found != MAP_FAILED) page = found;
    }
    content what = look_at(fd, page);
    bool right = what == (timeline ? TIMELINE_PAGE : BINARY_PAGE);
    if (page && !right) {
        munmap(page, page_size());
        page = NULL;
    }
    if (what == OTHER) return GIS_UNKNOWN; /* leaves the descriptor open, unlike memory's */
    if (right && !timeline) {
        pthread_mutex_t *mutex = (pthread_mutex_t *)page;
        if (!take_lock(mutex, LOCK_SECONDS)) {
            munmap(page, page_size());
            return GIS_UNKNOWN;
        }
        ++*(int32_t *)(page + REFERENCES);
        pthread_mutex_unlock(mutex);
    }
    /* Another kind of object is accepted silently, and is useless. */
    gis_make_semaphore(context, right ? (timeline ? GIS_TIMELINE : GIS_BINARY) : GIS_DEAD, semaphore);
    (*semaphore)->page = page;
    if ((*semaphore)->kind == GIS_TIMELINE) (*semaphore)->file = open_anew(fd);
    close(fd);
    return GIS_OK;
}

static uint32_t *sequence_of(const gis_semaphore *it) { return (uint32_t *)(it->page + SEQUENCE); }

static void signal_binary(gis_semaphore *it) {
    bool locked = take_lock(mutex_of(it), LOCK_SECONDS);
    __atomic_store_n(it->page + SIGNALED, 1, __ATOMIC_RELEASE);
    if (!locked) return;
    pthread_cond_broadcast((pthread_cond_t *)(it->page + COND));
    pthread_mutex_unlock(mutex_of(it));
}

static void signal_timeline(gis_semaphore *it, uint64_t value) {
    uint64_t *counter = (uint64_t *)(it->page + VALUE);
    int lock = lock_file(it);
    if (lock < 0) return;
    uint64_t now = __atomic_load_n(counter, __ATOMIC_RELAXED);
    if (value > now) {
        __atomic_store_n(counter, value, __ATOMIC_RELEASE);
        __atomic_add_fetch(sequence_of(it), 1, __ATOMIC_RELEASE);
    } else if (value < now) { /* no error; the page is shared with other processes, so it stays unchanged */
        __atomic_store_n(&it->backwards_value, value, __ATOMIC_RELAXED);
        __atomic_store_n(&it->at_sequence, __atomic_load_n(sequence_of(it), __ATOMIC_RELAXED), __ATOMIC_RELAXED);
        __atomic_store_n(&it->backwards, true, __ATOMIC_RELEASE);
    }
    flock(lock, LOCK_UN); /* close is not enough: a forked child may have the description too */
    close(lock);
    syscall(SYS_futex, sequence_of(it), FUTEX_WAKE, 0x7fffffff, NULL, NULL, 0);
}

void gis_semaphore_signal(gis_semaphore *it, uint64_t value) {
    if (it->kind == GIS_BINARY) signal_binary(it);
    if (it->kind == GIS_TIMELINE) signal_timeline(it, value);
}

static bool take_signal(gis_semaphore *it) {
    if (!__atomic_load_n(it->page + SIGNALED, __ATOMIC_ACQUIRE)) return false;
    bool locked = take_lock(mutex_of(it), LOCK_SECONDS);
    bool taken = __atomic_exchange_n(it->page + SIGNALED, 0, __ATOMIC_ACQ_REL);
    if (locked) pthread_mutex_unlock(mutex_of(it));
    return taken;
}

static void pause_for(uint64_t *nanoseconds) {
    struct timespec pause = {0, (long)*nanoseconds};
    nanosleep(&pause, NULL);
    *nanoseconds = *nanoseconds + *nanoseconds / 2;
    if (*nanoseconds > 1000000) *nanoseconds = 1000000;
}

static bool timeline_reached(gis_semaphore *it, uint64_t value, uint32_t sequence) {
    if (__atomic_load_n((uint64_t *)(it->page + VALUE), __ATOMIC_ACQUIRE) < value) return false;
    return !__atomic_load_n(&it->backwards, __ATOMIC_ACQUIRE) ||
           __atomic_load_n(&it->at_sequence, __ATOMIC_RELAXED) != sequence ||
           value <= __atomic_load_n(&it->backwards_value, __ATOMIC_RELAXED);
}

void gis_semaphore_wait(gis_semaphore *it, uint64_t value) {
    uint64_t pause = 20000;
    int spins = 30;
    if (it->kind == GIS_DUMMY || it->kind == GIS_SCI_SYNC) return;
    for (;;) {
        uint32_t sequence = 0;
        if (it->kind == GIS_BINARY && take_signal(it)) return;
        if (it->kind == GIS_TIMELINE) {
            sequence = __atomic_load_n(sequence_of(it), __ATOMIC_ACQUIRE);
            if (timeline_reached(it, value, sequence)) return;
        }
        if (spins > 0) {
            spins--;
            sched_yield();
        } else if (it->kind == GIS_TIMELINE) {
            struct timespec slice = {0, 50000000};
            syscall(SYS_futex, sequence_of(it), FUTEX_WAIT, sequence, &slice, NULL, 0);
        } else {
            pause_for(&pause);
        }
    }
}
