/* Counts what a program copies in its memory, from beneath it: a library to be loaded before all others (ld.so(8)).
 *
 * It takes the place of the C library's copying functions and adds up the bytes of each call with at least LEAST bytes
 * in the file that the variable COPIES_FILE names. All processes with the same file add to the same number.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* Bytes of a call from which it counts: a page. Frames of calls are smaller. */
enum { LEAST = 4096 };

static uint64_t here;
static uint64_t *total = &here;

/* The functions of the C library are resolved by its dynamic linker according to the processor, so that their addresses
 * are asked for; until they are known, bytes are moved one by one. */
typedef void *(*copier)(void *, const void *, size_t);
static copier copy, move;

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("COPIES_FILE");
    int fd = path == NULL ? -1 : open(path, O_RDWR | O_CLOEXEC);

    move = (copier)dlsym(RTLD_NEXT, "memmove");
    copy = (copier)dlsym(RTLD_NEXT, "memcpy");
    if (fd >= 0) {
        void *mapped = mmap(NULL, sizeof here, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (mapped != MAP_FAILED)
            total = mapped;
        close(fd);
    }
}

static void *one_by_one(void *to, const void *from, size_t size)
{
    volatile unsigned char *target = to;
    const volatile unsigned char *source = from;

    if (target <= source)
        for (size_t i = 0; i < size; i++)
            target[i] = source[i];
    else
        for (size_t i = size; i-- > 0;)
            target[i] = source[i];
    return to;
}

static void *counted(copier by, void *to, const void *from, size_t size)
{
    if (size >= LEAST)
        __atomic_fetch_add(total, size, __ATOMIC_RELAXED);
    return by == NULL ? one_by_one(to, from, size) : by(to, from, size);
}

void *memcpy(void *restrict to, const void *restrict from, size_t size)
{
    return counted(copy, to, from, size);
}

void *memmove(void *to, const void *from, size_t size)
{
    return counted(move, to, from, size);
}

void *__memcpy_chk(void *restrict to, const void *restrict from, size_t size, size_t room)
{
    if (size > room)
        abort();
    return counted(copy, to, from, size);
}

void *__memmove_chk(void *to, const void *from, size_t size, size_t room)
{
    if (size > room)
        abort();
    return counted(move, to, from, size);
}

void *mempcpy(void *restrict to, const void *restrict from, size_t size)
{
    return (char *)counted(copy, to, from, size) + size;
}
