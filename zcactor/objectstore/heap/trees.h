/* The trees that blocks stand in: treaps (Seidel and Aragon, Randomized Search Trees, 1996), O(log n) for an operation.
 *
 * A free block stands in the tree of its size class, ordered by (size, offset). An allocated block stands in the tree
 * of all allocated blocks, ordered by offset. One pair of links serves both, because no block is in two trees.
 *
 * Called under the heap's lock. Included by blocks.c alone: the compiler makes a copy of a function for either order.
 */
#ifndef ZCACTOR_TREES_H
#define ZCACTOR_TREES_H
#include "heap.h"

static inline int bin_of(uint64_t size) {
    int e = 63 - __builtin_clzll(size);
    return e * 4 + (int)(e >= 2 ? size >> (e - 2) & 3 : 0);
}
/* Whether block `n` comes before (size, offset), or without a size before (offset). */
static inline int precedes(const heap_t *h, uint32_t n, uint64_t size, uint64_t offset, int by_size) {
    const block_t *b = h->blocks + n;
    return by_size && b->size != size ? b->size < size : b->offset < offset;
}
static void tree_split(heap_t *h, uint32_t root, const block_t *at, int by_size, uint32_t *low, uint32_t *high) {
    if (root == NIL) { *low = *high = NIL; return; }
    if (precedes(h, root, at->size, at->offset, by_size)) {
        *low = root;
        tree_split(h, h->blocks[root].right, at, by_size, &h->blocks[root].right, high);
    } else {
        *high = root;
        tree_split(h, h->blocks[root].left, at, by_size, low, &h->blocks[root].left);
    }
}
static uint32_t tree_join(heap_t *h, uint32_t low, uint32_t high) {
    if (low == NIL || high == NIL) return low ? low : high;
    if (h->blocks[low].priority > h->blocks[high].priority) {
        h->blocks[low].right = tree_join(h, h->blocks[low].right, high);
        return low;
    }
    h->blocks[high].left = tree_join(h, low, h->blocks[high].left);
    return high;
}
static void tree_insert(heap_t *h, uint32_t *root, uint32_t n, int by_size) {
    block_t *b = h->blocks + n;
    h->random ^= h->random << 13, h->random ^= h->random >> 7, h->random ^= h->random << 17;
    b->priority = (uint32_t)(h->random >> 32);
    while (*root != NIL && h->blocks[*root].priority >= b->priority)
        root = precedes(h, *root, b->size, b->offset, by_size) ? &h->blocks[*root].right : &h->blocks[*root].left;
    uint32_t low, high;
    tree_split(h, *root, b, by_size, &low, &high);
    b->left = low;
    b->right = high;
    *root = n;
}
static void tree_remove(heap_t *h, uint32_t *root, uint32_t n, int by_size) {
    const block_t *b = h->blocks + n;
    while (*root != n)
        root = precedes(h, *root, b->size, b->offset, by_size) ? &h->blocks[*root].right : &h->blocks[*root].left;
    *root = tree_join(h, b->left, b->right);
}
/* The first block that does not come before (size, offset), or without a size before (offset). */
static uint32_t tree_first(const heap_t *h, uint32_t root, uint64_t size, uint64_t offset, int by_size) {
    uint32_t best = NIL;
    while (root != NIL) {
        if (precedes(h, root, size, offset, by_size)) root = h->blocks[root].right;
        else { best = root; root = h->blocks[root].left; }
    }
    return best;
}
#endif
