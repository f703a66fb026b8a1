/* The ids of blocks, by which peers name them. A peer that knows the id of a block may read it, so ids cannot be
 * guessed.
 *
 * Called under the heap's lock, which is not released here.
 */
#include "heap.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>

/* Get random bytes from the system. If it has none, the process ends: an id that can be guessed is worse than no id. */
static void have_random(void *to, size_t nbytes) {
    size_t got = 0;
    ssize_t more = 1;
    while (got < nbytes && (more > 0 || errno == EINTR))
        if ((more = getrandom((char *)to + got, nbytes - got, 0)) > 0) got += (size_t)more;
    if (got == nbytes) return;
    int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC); /* a sandbox may allow files and no getrandom(2) */
    more = fd < 0 ? 0 : 1;
    while (got < nbytes && (more > 0 || (more < 0 && errno == EINTR)))
        if ((more = read(fd, (char *)to + got, nbytes - got)) > 0) got += (size_t)more;
    if (fd >= 0) close(fd);
    if (got == nbytes) return;
    fprintf(stderr, "zcactor: neither getrandom(2) nor /dev/urandom gives random bytes, "
                    "which ids of objects are made of: allow one\n");
    abort();
}
/* Random numbers from a seed (splitmix64). */
static void seeded(heap_t *h) {
    for (unsigned i = 0; i < sizeof h->salts / sizeof *h->salts; i++) {
        uint64_t z = h->seed += 0x9e3779b97f4a7c15;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
        z = (z ^ z >> 27) * 0x94d049bb133111eb;
        h->salts[i] = (uint32_t)((z ^ z >> 31) >> 32);
    }
}
/* An id that a peer cannot guess: 32 bits of a counter and 32 random bits. It repeats only after 2**32 objects, and
 * then with a probability of 2**-32. */
uint64_t id_of(heap_t *h, uint32_t n) {
    if (h->blocks[n].id == 0) {
        if (h->nsalts == 0) {
            if (h->seed) seeded(h);
            else have_random(h->salts, sizeof h->salts);
            h->nsalts = sizeof h->salts / sizeof *h->salts;
        }
        if (++h->number == 0) h->number = 1;
        h->blocks[n].id = (uint64_t)h->number << 32 | h->salts[--h->nsalts];
    }
    return h->blocks[n].id;
}
