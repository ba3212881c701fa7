// Row and column statistics of what one warp holds: STRIPS strips (16 rows each) of the same 8 GROUPS columns.
//
// Rows come out in registers, the same in the four lanes of a row. Columns come out in shared memory, one number for
// each column of the warp, summed over the warp's rows; the kernel joins its warps in a fixed order.
// GROUPS must be a multiple of 8. The layout of a strip is that of pairs.cuh.
#pragma once

#include "pairs.cuh"

namespace contrastile {

// A spread at which no term that is subtracted from its maximum is flushed: 2^-100 is far above 2^-126.
constexpr float SPREAD = 100.0f;
// A sum of less than 2^8 terms that is at least this has lost less than 2^-28 of itself to terms flushed under 2^-126.
constexpr float TRUSTED = 0x1p-90f;

// Sums of four lanes of a row.
__device__ __forceinline__ float row_total(float x) {
    x += across(x, 1);
    return x + across(x, 2);
}

// One step of summing lists across lanes: lanes that differ in `bit` trade halves, so that each keeps HALF sums of two.
// The upper lane keeps the upper half.
template <int HALF, int SIZE>
__device__ __forceinline__ void trade_halves(float (&list)[SIZE], int lane, int bit) {
    const bool upper = lane & bit;
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
        const float kept = upper ? list[i + HALF] : list[i], given = upper ? list[i] : list[i + HALF];
        list[i] = kept + across(given, bit);
    }
}

// The smaller; a NaN stays, which fminf would pass over.
__device__ __forceinline__ float least_of(float a, float b) { return a < b || a != a ? a : b; }

// First group of the GROUPS / 8 whose columns a lane ends with.
template <int GROUPS>
__device__ __forceinline__ int first_group(int lane) {
    return (lane & 16 ? GROUPS / 2 : 0) + (lane & 8 ? GROUPS / 4 : 0) + (lane & 4 ? GROUPS / 8 : 0);
}

// Sums of 2^(dot scale + shift): one exponential an element, for rows and columns.
//
// row: [strip][q]. column: shared, 8 GROUPS floats of this warp. Gives the least of this lane's columns, NaN for NaN.
// Hazard: beside 96 STRIPS accumulators a list of all column sums spills. The first of its three halvings is fused with
// the exponentials, so that it never holds more than GROUPS values.
template <int STRIPS, int GROUPS>
__device__ __forceinline__ float shared_sums(const float (&dot)[STRIPS][4 * GROUPS], float scale, float shift, int lane,
                                            float (&row)[STRIPS][2], float* column) {
#pragma unroll
    for (int s = 0; s < STRIPS; ++s) row[s][0] = row[s][1] = 0.0f;
    float list[GROUPS];
    const bool upper = lane & 16;
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
        float sum[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int at = 4 * (i / 2 + h * (GROUPS / 2)) + i % 2;
            sum[h] = 0.0f;
#pragma unroll
            for (int s = 0; s < STRIPS; ++s) {
                const float top = exp2_fast(fmaf(dot[s][at], scale, shift));
                const float low = exp2_fast(fmaf(dot[s][at + 2], scale, shift));
                row[s][0] += top;
                row[s][1] += low;
                sum[h] += top + low;
            }
        }
        list[i] = (upper ? sum[1] : sum[0]) + across(upper ? sum[0] : sum[1], 16);
    }
    trade_halves<GROUPS / 2>(list, lane, 8);
    trade_halves<GROUPS / 4>(list, lane, 4);
    float* mine = column + 8 * first_group<GROUPS>(lane) + 2 * (lane & 3);
    float least = list[0];
#pragma unroll
    for (int i = 0; i < GROUPS / 8; ++i) {
        *reinterpret_cast<float2*>(mine + 8 * i) = make_float2(list[2 * i], list[2 * i + 1]);
        least = least_of(least, least_of(list[2 * i], list[2 * i + 1]));
    }
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
#pragma unroll
        for (int q = 0; q < 2; ++q) row[s][q] = row_total(row[s][q]);
    return least;
}

// The same sums, each exponential handed on as it is made, rounded to T: sink(strip, pair, values), values[2 h + q] being
// the thread's two of row q of group 2 pair + h. Neighbouring groups are traded first: a sink takes them together.
template <class T, int STRIPS, int GROUPS, class Sink>
__device__ __forceinline__ void shared_sums_kept(const float (&dot)[STRIPS][4 * GROUPS], float scale, float shift,
                                                 int lane, float (&row)[STRIPS][2], float* column, Sink sink) {
#pragma unroll
    for (int s = 0; s < STRIPS; ++s) row[s][0] = row[s][1] = 0.0f;
    float list[GROUPS];
    const bool upper = lane & 16;
#pragma unroll
    for (int pair = 0; pair < GROUPS / 2; ++pair) {
        float sum[2][2] = {};  // of the groups' columns
#pragma unroll
        for (int s = 0; s < STRIPS; ++s) {
            unsigned values[4];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float power[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    power[e] = exp2_fast(fmaf(dot[s][8 * pair + 4 * h + e], scale, shift));
                    row[s][e >> 1] += power[e];
                }
                sum[h][0] += power[0] + power[2];
                sum[h][1] += power[1] + power[3];
                values[2 * h] = narrow_pair<T>(power[0], power[1]);
                values[2 * h + 1] = narrow_pair<T>(power[2], power[3]);
            }
            sink(s, pair, values);
        }
#pragma unroll
        for (int c = 0; c < 2; ++c)
            list[2 * pair + c] = (upper ? sum[1][c] : sum[0][c]) + across(upper ? sum[0][c] : sum[1][c], 16);
    }
    trade_halves<GROUPS / 2>(list, lane, 8);
    trade_halves<GROUPS / 4>(list, lane, 4);
    const int first = (lane & 8 ? GROUPS / 2 : 0) + (lane & 4 ? GROUPS / 4 : 0) + (upper ? 1 : 0);
#pragma unroll
    for (int i = 0; i < GROUPS / 8; ++i)
        *reinterpret_cast<float2*>(column + 8 * (first + 2 * i) + 2 * (lane & 3)) =
            make_float2(list[2 * i], list[2 * i + 1]);
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
#pragma unroll
        for (int q = 0; q < 2; ++q) row[s][q] = row_total(row[s][q]);
}

// The dot of the larger logit. Written without a product with the scale, which the compiler would keep for all dots.
__device__ __forceinline__ float larger(float a, float b, float scale) {
    return scale < 0.0f ? fminf(a, b) : fmaxf(a, b);
}

// log2 sum 2^x of one row of a strip, against the row's own maximum; -inf for nothing, NaN for NaN.
template <int GROUPS>
__device__ __forceinline__ float row_log_sum(const float (&dot)[4 * GROUPS], int q, float scale) {
    float top = nothing(scale);
#pragma unroll
    for (int i = 0; i < 2 * GROUPS; ++i) top = larger(top, dot[4 * (i / 2) + 2 * q + i % 2], scale);
    top = larger(top, across(top, 1), scale);
    const float shift = finite_or_zero(larger(top, across(top, 2), scale) * scale);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * GROUPS; ++i) sum += exp2_fast(fmaf(dot[4 * (i / 2) + 2 * q + i % 2], scale, -shift));
    return shift + log2f(row_total(sum));
}

// The dot of the largest logit of a warp: half of the work of a running maximum for each row and column.
template <bool RISING, int STRIPS, int GROUPS>
__device__ __forceinline__ float largest_dot(const float (&dot)[STRIPS][4 * GROUPS]) {
    constexpr int CHAINS = 4;  // comparisons wait for one another
    const float sign = RISING ? 1.0f : -1.0f;
    float top[CHAINS];
#pragma unroll
    for (int i = 0; i < CHAINS; ++i) top[i] = dot[0][i];
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
#pragma unroll
        for (int i = 0; i < 4 * GROUPS; ++i) top[i % CHAINS] = larger(top[i % CHAINS], dot[s][i], sign);
    float most = larger(larger(top[0], top[1], sign), larger(top[2], top[3], sign), sign);
#pragma unroll
    for (int bit = 16; bit > 0; bit /= 2) most = larger(most, across(most, bit), sign);
    return most;
}

// Rows and columns each against their own maximum: two exponentials an element. Outputs as guarded_sums.
template <int STRIPS, int GROUPS>
__device__ __forceinline__ void own_sums(const float (&dot)[STRIPS][4 * GROUPS], float scale, int lane,
                                         float (&row)[STRIPS][2], float* column, float* reference) {
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
#pragma unroll
        for (int q = 0; q < 2; ++q) row[s][q] = row_log_sum<GROUPS>(dot[s], q, scale);
#pragma unroll
    for (int i = 0; i < 2 * GROUPS; ++i) {
        const int at = 4 * (i / 2) + i % 2;
        float top = nothing(scale);
#pragma unroll
        for (int s = 0; s < STRIPS; ++s) top = larger(top, larger(dot[s][at], dot[s][at + 2], scale), scale);
#pragma unroll
        for (int bit = 16; bit > 2; bit /= 2) top = larger(top, across(top, bit), scale);
        top = finite_or_zero(top * scale);
        float sum = 0.0f;
#pragma unroll
        for (int s = 0; s < STRIPS; ++s)
            sum += exp2_fast(fmaf(dot[s][at], scale, -top)) + exp2_fast(fmaf(dot[s][at + 2], scale, -top));
#pragma unroll
        for (int bit = 16; bit > 2; bit /= 2) sum += across(sum, bit);
        if (lane < 4) {
            column[8 * (i / 2) + 2 * lane + i % 2] = sum;
            reference[8 * (i / 2) + 2 * lane + i % 2] = top;
        }
    }
}

// Statistics of x = dot scale that hold for any logits.
//
// row: log2 sum 2^x, [strip][q]. column: shared; for each column of this warp the sum of 2^(x - reference).
// Where the warp's logits spread over less than SPREAD, their maximum is a reference for all of them, and one
// exponential an element is exact; else rows and columns each take their own maximum, two exponentials.
// A NaN passes by the maxima and comes out of the sums.
template <int STRIPS, int GROUPS>
__device__ __forceinline__ void guarded_sums(const float (&dot)[STRIPS][4 * GROUPS], float scale, int lane,
                                             float (&row)[STRIPS][2], float* column, float* reference) {
    float high = -infinity(), low = infinity();
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
#pragma unroll
        for (int i = 0; i < 4 * GROUPS; ++i) {
            high = fmaxf(high, dot[s][i]);
            low = fminf(low, dot[s][i]);
        }
#pragma unroll
    for (int bit = 16; bit > 0; bit /= 2) {
        high = fmaxf(high, across(high, bit));
        low = fminf(low, across(low, bit));
    }
    // an infinity or a spread that is not a number fails the comparison
    if (fabsf(scale) * (high - low) <= SPREAD) {
        const float top = scale >= 0.0f ? high * scale : low * scale;
        shared_sums<STRIPS, GROUPS>(dot, scale, -top, lane, row, column);
#pragma unroll
        for (int s = 0; s < STRIPS; ++s)
#pragma unroll
            for (int q = 0; q < 2; ++q) row[s][q] = top + log2f(row[s][q]);
        for (int i = lane; i < 8 * GROUPS; i += 32) reference[i] = top;
        return;
    }
    own_sums<STRIPS, GROUPS>(dot, scale, lane, row, column, reference);
}

// The same with half of the comparisons, where there are registers: the warp's largest logit is tried as the reference.
// Where every sum comes out large enough to be trusted that is exact; else the warp starts again. NaN is never trusted.
template <int STRIPS, int GROUPS>
__device__ __forceinline__ void tried_sums(const float (&dot)[STRIPS][4 * GROUPS], float scale, int lane,
                                           float (&row)[STRIPS][2], float* column, float* reference) {
    const float most = scale < 0.0f ? largest_dot<false, STRIPS, GROUPS>(dot) : largest_dot<true, STRIPS, GROUPS>(dot);
    const float top = most * scale;
    float least = shared_sums<STRIPS, GROUPS>(dot, scale, -top, lane, row, column);
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
#pragma unroll
        for (int q = 0; q < 2; ++q) least = least_of(least, row[s][q]);
    if (!__all_sync(WHOLE_WARP, least >= TRUSTED)) {
        __syncwarp();  // other lanes write the same columns again
        own_sums<STRIPS, GROUPS>(dot, scale, lane, row, column, reference);
        return;
    }
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
#pragma unroll
        for (int q = 0; q < 2; ++q) row[s][q] = top + log2f(row[s][q]);
#pragma unroll
    for (int i = 0; i < GROUPS / 4; ++i) reference[lane + 32 * i] = top;
}

// One column's guarded sums joined over WARPS warps, `stride` floats apart: log2 sum 2^x.
template <int WARPS>
__device__ __forceinline__ float join_guarded(const float* sum, const float* reference, int stride) {
    float top = -infinity();
#pragma unroll
    for (int w = 0; w < WARPS; ++w)
        if (sum[w * stride] != 0.0f) top = fmaxf(top, reference[w * stride]);  // true for NaN
    top = finite_or_zero(top);
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w)
        if (sum[w * stride] != 0.0f) total += sum[w * stride] * exp2f(reference[w * stride] - top);
    return top + log2f(total);
}

// Sums of the dots of positive pairs, and their counts (TARGET).
//
// row_dot, row_count: [strip][q]. column_dot, column_count: shared, of this warp. `columns` as in admit; a row that is
// not inside must carry an exclusion or an id that matches nothing, or be left unread.
template <int MASK, int STRIPS, int GROUPS>
__device__ __forceinline__ void positive_sums(const float (&dot)[STRIPS][4 * GROUPS], const PairRow (&rows)[STRIPS][2],
                                              const bool (&inside)[STRIPS][2], const long long* ids, int columns,
                                              int lane, float (&row_dot)[STRIPS][2], float (&row_count)[STRIPS][2],
                                              float* column_dot, float* column_count) {
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
#pragma unroll
        for (int q = 0; q < 2; ++q) row_dot[s][q] = row_count[s][q] = 0.0f;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        const longlong2 id = pair_of_ids<MASK>(ids, g);
        float sum[2] = {0.0f, 0.0f}, count[2] = {0.0f, 0.0f};
#pragma unroll
        for (int s = 0; s < STRIPS; ++s)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int q = e >> 1, c = e & 1, column = 8 * g + c;
                if (inside[s][q] && column < columns && standing<MASK>(rows[s][q], column, c ? id.y : id.x).positive) {
                    row_dot[s][q] += dot[s][4 * g + e];
                    row_count[s][q] += 1.0f;
                    sum[c] += dot[s][4 * g + e];
                    count[c] += 1.0f;
                }
            }
#pragma unroll
        for (int c = 0; c < 2; ++c) {
#pragma unroll
            for (int bit = 16; bit > 2; bit /= 2) {
                sum[c] += across(sum[c], bit);
                count[c] += across(count[c], bit);
            }
            if (lane < 4) {
                column_dot[8 * g + 2 * lane + c] = sum[c];
                column_count[8 * g + 2 * lane + c] = count[c];
            }
        }
    }
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            row_dot[s][q] = row_total(row_dot[s][q]);
            row_count[s][q] = row_total(row_count[s][q]);
        }
}

}  // namespace contrastile
