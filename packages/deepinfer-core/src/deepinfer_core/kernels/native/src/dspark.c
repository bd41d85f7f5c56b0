/* Heads of the DSpark drafter: E = embed[previous]; logits = base + E head; z = w . [hidden ; E] */
#include "common.h"

/* base [rows, V], hidden [rows, D], previous [rows], embed [V, rank], head [rank, V], confidence [D + rank]
   -> logits [rows, V], z [rows] */
int di_markov_step(const float *base, int64_t base_row, const float *hidden, int64_t hidden_row, const int64_t *previous,
                   const float *embed, const float *head, const float *confidence, float *logits, float *z, int64_t rows,
                   int64_t vocabulary, int64_t dim, int64_t rank) {
    for (int64_t r = 0; r < rows; r++) {
        if (previous[r] < 0 || previous[r] >= vocabulary) return BAD_ROW;
        const float *embedded = embed + previous[r] * rank, *own = base + r * base_row;
        float *out = logits + r * vocabulary;
        int status = gemm(embedded, rank, 1, head, vocabulary, out, vocabulary, 1, rank, vocabulary);
        if (status != OK) return status;
        for (int64_t v = 0; v < vocabulary; v++) out[v] += own[v];
        z[r] = sum_of_products(hidden + r * hidden_row, confidence, dim)
             + sum_of_products(embedded, confidence + dim, rank);
    }
    return OK;
}
