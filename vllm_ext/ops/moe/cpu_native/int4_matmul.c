/* out = x * W^T for 4-bit W, in BF16 dot products (AVX-512 BF16: Zen 4, Cooper Lake, Sapphire Rapids and later).
 *
 * W[n, k] = (code[n, k] - 8) * scale[n, g] + zero[n, g] with g = k / group. The codes minus 8 are exact in BF16, so a
 * group's products are summed unscaled; its scale, and its zero times the group's sum of x, enter once a group.
 * The sum over k runs in one order whatever the number of rows or threads: a row's bits depend on that row only.
 *
 * codes  uint16 [N / 64, K / 2, 32]: word 2 * lane + p, nibble j holds row 64 * block + 16 * j + lane, column 2 * pair + p
 * scales_zeros  BF16 [K / group, N, 2]
 */
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define VECTORS 4
#define BLOCK (LANES * VECTORS)
#define MAX_ROWS 6
/* Rows of x that are multiplied with a block of W while it is in the cache. */
#define CHUNK 192

typedef struct {
    const uint16_t *x;
    const uint16_t *codes;
    const uint16_t *scales_zeros;
    const float *sums;
    float *out;
    int64_t n, k, group;
} problem;

static inline __attribute__((always_inline)) void block_rows(const problem *p, int64_t block, int64_t first, const int rows)
{
    const int64_t groups = p->k / p->group, pairs = p->group / 2;
    const __m512i table = _mm512_set_epi16(
        0x40E0, 0x40C0, 0x40A0, 0x4080, 0x4040, 0x4000, 0x3F80, 0, (short)0xBF80, (short)0xC000, (short)0xC040,
        (short)0xC080, (short)0xC0A0, (short)0xC0C0, (short)0xC0E0, (short)0xC100,
        0x40E0, 0x40C0, 0x40A0, 0x4080, 0x4040, 0x4000, 0x3F80, 0, (short)0xBF80, (short)0xC000, (short)0xC040,
        (short)0xC080, (short)0xC0A0, (short)0xC0C0, (short)0xC0E0, (short)0xC100);
    const uint16_t *codes = p->codes + block * p->k * (BLOCK / 4);
    const uint16_t *x[MAX_ROWS];
    __m512 total[MAX_ROWS][VECTORS];
    for (int m = 0; m < rows; m++) {
        x[m] = p->x + (first + m) * p->k;
        for (int v = 0; v < VECTORS; v++)
            total[m][v] = _mm512_setzero_ps();
    }
    for (int64_t g = 0; g < groups; g++) {
        __m512 sum[MAX_ROWS][VECTORS];
        for (int m = 0; m < rows; m++)
            for (int v = 0; v < VECTORS; v++)
                sum[m][v] = _mm512_setzero_ps();
        for (int64_t pair = 0; pair < pairs; pair++, codes += 32) {
            const __m512i word = _mm512_loadu_si512(codes);
            /* The look-up reads five bits of each word; the table repeats, so the fifth does not matter. */
            const __m512bh weights[VECTORS] = {
                (__m512bh)_mm512_permutexvar_epi16(word, table),
                (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(word, 4), table),
                (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(word, 8), table),
                (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(word, 12), table),
            };
            for (int m = 0; m < rows; m++) {
                int32_t columns;
                memcpy(&columns, x[m] + (g * pairs + pair) * 2, sizeof columns);
                const __m512bh both = (__m512bh)_mm512_set1_epi32(columns);
                for (int v = 0; v < VECTORS; v++)
                    sum[m][v] = _mm512_dpbf16_ps(sum[m][v], weights[v], both);
            }
        }
        for (int v = 0; v < VECTORS; v++) {
            const __m512i both = _mm512_loadu_si512(p->scales_zeros + (g * p->n + block * BLOCK + v * LANES) * 2);
            const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
            const __m512 zero = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xFFFF0000)));
            for (int m = 0; m < rows; m++) {
                const __m512 ones = _mm512_set1_ps(p->sums[(first + m) * groups + g]);
                total[m][v] = _mm512_fmadd_ps(sum[m][v], scale, _mm512_fmadd_ps(zero, ones, total[m][v]));
            }
        }
    }
    for (int m = 0; m < rows; m++)
        for (int v = 0; v < VECTORS; v++)
            _mm512_storeu_ps(p->out + (first + m) * p->n + block * BLOCK + v * LANES, total[m][v]);
}

static void block_chunk(const problem *p, int64_t block, int64_t first, int64_t rows)
{
    while (rows > 0) {
        const int64_t parts = (rows + MAX_ROWS - 1) / MAX_ROWS, now = (rows + parts - 1) / parts;
        switch (now) {
        case 1: block_rows(p, block, first, 1); break;
        case 2: block_rows(p, block, first, 2); break;
        case 3: block_rows(p, block, first, 3); break;
        case 4: block_rows(p, block, first, 4); break;
        case 5: block_rows(p, block, first, 5); break;
        default: block_rows(p, block, first, 6); break;
        }
        first += now;
        rows -= now;
    }
}

static float group_sum(const uint16_t *x, int64_t count)
{
    const __m512bh one = (__m512bh)_mm512_set1_epi16(0x3F80);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t k = 0; k < count; k += 32)
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(x + k), one);
    return _mm512_reduce_add_ps(sum);
}

/* x BF16 [m, k], out FP32 [m, n]; n a multiple of 64, k of group, group of 32. 0, or -1 when memory runs out. */
int int4_matmul(const uint16_t *x, const uint16_t *codes, const uint16_t *scales_zeros, float *out, int64_t m, int64_t n,
                int64_t k, int64_t group)
{
    const int64_t groups = k / group, blocks = n / BLOCK, chunks = (m + CHUNK - 1) / CHUNK;
    float *sums = malloc((size_t)(m * groups) * sizeof(float));
    if (!sums)
        return -1;
    for (int64_t row = 0; row < m; row++)
        for (int64_t g = 0; g < groups; g++)
            sums[row * groups + g] = group_sum(x + row * k + g * group, group);
    const problem p = {x, codes, scales_zeros, sums, out, n, k, group};
#ifdef _OPENMP
#pragma omp parallel for schedule(static) if (m * n * k > 1 << 18)
#endif
    for (int64_t task = 0; task < chunks * blocks; task++) {
        const int64_t first = task / blocks * CHUNK;
        block_chunk(&p, task % blocks, first, m - first < CHUNK ? m - first : CHUNK);
    }
    free(sums);
    return 0;
}
