/* Pages of 64 KiB, as some kernels for aarch64 have them: a library for LD_PRELOAD. It answers what a program asks about
 * pages, and refuses mappings that such a kernel refuses. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#define LARGE 65536

long sysconf(int name) {
    long (*next)(int) = (long (*)(int))dlsym(RTLD_NEXT, "sysconf");
    return name == _SC_PAGESIZE ? LARGE : next(name);
}
void *mmap(void *address, size_t nbytes, int access, int flags, int fd, off_t offset) {
    void *(*next)(void *, size_t, int, int, int, off_t) =
        (void *(*)(void *, size_t, int, int, int, off_t))dlsym(RTLD_NEXT, "mmap");
    if (offset % LARGE || (flags & MAP_FIXED && (uintptr_t)address % LARGE)) {
        errno = EINVAL;
        return MAP_FAILED;
    }
    return next(address, nbytes, access, flags, fd, offset);
}
