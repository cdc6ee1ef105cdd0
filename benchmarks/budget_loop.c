/* The padded-budget rule that jvarlen.batch_by_tokens has, as a plain loop: what a compiled language needs for it.

   lengths[n] are in order, none above max_tokens. A batch is at most max_tokens = sequences × longest, and has fewer
   sequences than `multiple` or a multiple of it. Writes the exclusive end of each batch into ends[n], returns how
   many there are. */

#include <stdint.h>

int64_t close_by_budget(const int64_t *lengths, int64_t n, int64_t max_tokens, int64_t multiple, int64_t *ends)
{
    int64_t num_batches = 0;
    int64_t first = 0;        /* the open batch begins here, */
    int64_t allowed = 0;      /* and up to here its size is allowed; what follows waits for the next multiple */
    int64_t longest = 0;      /* of first..allowed */
    int64_t longest_tail = 0; /* of allowed..i */

    for (int64_t i = 0; i < n; i++) {
        int64_t count = i + 1 - first;
        if (lengths[i] > longest_tail)
            longest_tail = lengths[i];
        int64_t longest_all = longest > longest_tail ? longest : longest_tail;
        int is_over = longest_all * count > max_tokens;
        if (is_over) {
            ends[num_batches++] = allowed;
            if (longest_tail * (i + 1 - allowed) > max_tokens) {
                ends[num_batches++] = i; /* the tail is a batch of its own */
                allowed = i;
                longest_tail = lengths[i];
            }
            first = allowed;
            longest_all = longest_tail;
        }
        if (is_over || count < multiple || count % multiple == 0) {
            allowed = i + 1;
            longest = longest_all;
            longest_tail = 0;
        }
    }
    ends[num_batches++] = allowed;
    if (allowed < n)
        ends[num_batches++] = n;
    return num_batches;
}
