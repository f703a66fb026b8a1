/* Threads that allocate and free by PyTorch's functions at the same time, and check that no two pieces overlap. The
 * caller may have the interpreter lock: nothing here takes it. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/types.h>

typedef void *(*alloc_t)(ssize_t, int, void *);
typedef void (*free_t)(void *, ssize_t, int, void *);

#define THREADS 4
#define HELD 16

static alloc_t alloc_;
static free_t free_;
static int device_;
static long rounds_, failed, overlaps;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t low[THREADS * HELD], high[THREADS * HELD];

static void *work(void *argument) {
    long thread = (long)argument;
    unsigned seed = (unsigned)thread + 1;
    for (long round = 0; round < rounds_; round++) {
        long place = thread * HELD + rand_r(&seed) % HELD;
        pthread_mutex_lock(&lock);
        uint64_t old = low[place], size = high[place] - old;
        low[place] = high[place] = 0;
        pthread_mutex_unlock(&lock);
        if (old) free_((void *)old, (ssize_t)size, device_, NULL);
        ssize_t wanted = 1 + rand_r(&seed) % (1 << 19);
        uint64_t made = (uint64_t)alloc_(wanted, device_, NULL);
        pthread_mutex_lock(&lock);
        if (!made || made % 512) failed++;
        for (int i = 0; i < THREADS * HELD; i++)
            if (low[i] && made < high[i] && low[i] < made + (uint64_t)wanted) overlaps++;
        low[place] = made;
        high[place] = made + (uint64_t)wanted;
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

/* Returns the pieces that were refused, and 1,000,000 for each overlap. All is freed again. */
long run(alloc_t alloc, free_t give_back, int device, long rounds) {
    alloc_ = alloc;
    free_ = give_back;
    device_ = device;
    rounds_ = rounds;
    failed = overlaps = 0;
    pthread_t threads[THREADS];
    for (long i = 0; i < THREADS; i++) pthread_create(threads + i, NULL, work, (void *)i);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < THREADS * HELD; i++) {
        if (low[i]) free_((void *)low[i], (ssize_t)(high[i] - low[i]), device_, NULL);
        low[i] = high[i] = 0;
    }
    return failed + 1000000 * overlaps;
}

/* CUDA's functions that make an extent, and fail where a test says so. */
static uint64_t next = (uint64_t)1 << 40;
long calls[9];
int fails = -1;
static _Thread_local int mode; /* 0: a capture by another thread is invalidated by each call but `synchronize` */

static int exchange(int *other) {
    int before = mode;
    mode = *other;
    *other = before;
    return 0;
}
static int call(int number) {
    calls[number]++;
    if (mode != 2 && number < 7) abort();
    return number == fails;
}
static int reserve(uint64_t *address, size_t nbytes, size_t alignment, uint64_t at, unsigned long long flags) {
    (void)alignment, (void)at, (void)flags;
    *address = next;
    next += nbytes;
    return call(0);
}
static int unreserve(uint64_t address, size_t nbytes) { return (void)address, (void)nbytes, call(1); }
static int create(uint64_t *handle, size_t nbytes, const void *properties, unsigned long long flags) {
    (void)flags;
    *handle = 77;
    return ((const int *)properties)[0] != 1 || nbytes % 64 ? 1 : call(2);
}
static int map(uint64_t address, size_t nbytes, size_t offset, uint64_t handle, unsigned long long flags) {
    (void)address, (void)nbytes, (void)offset, (void)flags;
    return handle == 77 ? call(3) : 1;
}
static int unmap(uint64_t address, size_t nbytes) { return (void)address, (void)nbytes, call(4); }
static int allow(uint64_t address, size_t nbytes, const void *access, size_t count) {
    (void)address, (void)nbytes;
    return count == 2 && ((const int *)access)[5] == 3 ? call(5) : 1;
}
static int release(uint64_t handle) { return (void)handle, call(6); }
static int synchronize(void *stream) { return (void)stream, call(7); }
void *functions[9] = {reserve, unreserve, create, map, unmap, allow, release, synchronize, exchange};
