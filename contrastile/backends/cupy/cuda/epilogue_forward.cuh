// Row and column statistics of one warp's accumulators: STRIPS strips (16 rows each) of the same 8 GROUPS columns.
//
// Rows come out in registers, the same in the four lanes of a row. Columns come out in shared memory, one number for
// each column of the warp, summed over the warp's rows; the kernel joins its warps in a fixed order.
// GROUPS must be a multiple of 8. The layout of a strip is that of pairs.cuh.
#pragma once

#include "pairs.cuh"

namespace contrastile {

// The largest spread of logits for which no exponential against their maximum is flushed: 2^-100 is far above 2^-126.
constexpr float SPREAD = 100.0f;

// One step of summing lists across lanes. Lanes that differ in `bit` exchange halves, and each keeps HALF sums of two
// numbers. The upper lane keeps the upper half.
template <int HALF, int SIZE>
__device__ __forceinline__ void exchange_halves(float (&list)[SIZE], int lane, int bit) {
    const bool upper = lane & bit;
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
        const float kept = upper ? list[i + HALF] : list[i], sent = upper ? list[i] : list[i + HALF];
        list[i] = kept + shuffle_xor(sent, bit);
    }
}

// The first of the GROUPS / 8 groups whose column sums a lane holds in the end.
template <int GROUPS>
__device__ __forceinline__ int first_group(int lane) {
    return (lane & 16 ? GROUPS / 2 : 0) + (lane & 8 ? GROUPS / 4 : 0) + (lane & 4 ? GROUPS / 8 : 0);
}

// The least term where FLOORED: the smallest normal number, which is never flushed.
constexpr float LEAST = 0x1p-126f;

// Sums of 2^(dot scale + shift), with one exponential per element for rows and columns. FLOOR: see FLOORED.
//
// row: [strip][q]. column: shared, 8 GROUPS floats of this warp. limits: NoLimits, Limits or a BeyondMask.
// Hazard: a list of all column sums spills beside 96 STRIPS accumulators. So the first of its three halvings is fused
// with the exponentials, and the list never holds more than GROUPS values.
template <int STRIPS, int GROUPS, bool FLOOR = false, class L>
__device__ __forceinline__ void shared_sums(const float (&dot)[STRIPS][4 * GROUPS], float scale, float shift, int lane,
                                            float (&row)[STRIPS][2], float* column, const L& limits) {
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
            for (int s = 0; s < STRIPS; ++s)
#pragma unroll
                for (int q = 0; q < 2; ++q) {
                    const float x = dot[s][at + 2 * q], exact = exp2_fast(fmaf(x, scale, shift));
                    const float power = FLOOR ? fmaxf(exact, LEAST) : exact;
                    if (!limits.beyond_row(x, s, at + 2 * q)) row[s][q] += power;
                    if (!limits.beyond_column(x, s, at + 2 * q)) sum[h] += power;
                }
        }
        list[i] = (upper ? sum[1] : sum[0]) + shuffle_xor(upper ? sum[0] : sum[1], 16);
    }
    exchange_halves<GROUPS / 2>(list, lane, 8);
    exchange_halves<GROUPS / 4>(list, lane, 4);
    float* mine = column + 8 * first_group<GROUPS>(lane) + 2 * (lane & 3);
#pragma unroll
    for (int i = 0; i < GROUPS / 8; ++i)
        *reinterpret_cast<float2*>(mine + 8 * i) = make_float2(list[2 * i], list[2 * i + 1]);
    for_each_row<STRIPS>([&](int s, int q) { row[s][q] = row_total(row[s][q]); });
}

// The same sums. Each exponential also goes, rounded to T, to sink(strip, pair, values), where values[2 h + q] holds the
// thread's two of row q of group 2 pair + h. Neighbouring groups are exchanged first, because a sink takes them together.
template <class T, int STRIPS, int GROUPS, class Sink>
__device__ __forceinline__ void shared_sums_kept(const float (&dot)[STRIPS][4 * GROUPS], float scale, float shift,
                                                 int lane, float (&row)[STRIPS][2], float* column, Sink sink) {
#pragma unroll
    for (int s = 0; s < STRIPS; ++s) row[s][0] = row[s][1] = 0.0f;
    float list[GROUPS];
    const bool upper = lane & 16;
#pragma unroll
    for (int pair = 0; pair < GROUPS / 2; ++pair) {
        float sum[2][2] = {};  // [group][column]
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
            list[2 * pair + c] = (upper ? sum[1][c] : sum[0][c]) + shuffle_xor(upper ? sum[0][c] : sum[1][c], 16);
    }
    exchange_halves<GROUPS / 2>(list, lane, 8);
    exchange_halves<GROUPS / 4>(list, lane, 4);
    const int first = (lane & 8 ? GROUPS / 2 : 0) + (lane & 4 ? GROUPS / 4 : 0) + (upper ? 1 : 0);
#pragma unroll
    for (int i = 0; i < GROUPS / 8; ++i)
        *reinterpret_cast<float2*>(column + 8 * (first + 2 * i) + 2 * (lane & 3)) =
            make_float2(list[2 * i], list[2 * i + 1]);
    for_each_row<STRIPS>([&](int s, int q) { row[s][q] = row_total(row[s][q]); });
}

// The dot of the larger logit. It uses no product with the scale, because the compiler would keep that for all dots.
__device__ __forceinline__ float larger(float a, float b, float scale) {
    return scale < 0.0f ? fminf(a, b) : fmaxf(a, b);
}

// The reference of a row or column whose largest logit has this dot.
__device__ __forceinline__ float reference_of(float top, float scale) { return finite_or_zero(top * scale); }

// The sum of 2^(x - reference) over row q of strip s, with the row's own maximum as reference; 0 if no pair counts.
template <int GROUPS, class L>
__device__ __forceinline__ float own_row_sum(const float (&dot)[4 * GROUPS], int s, int q, float scale, const L& limits,
                                             float& reference) {
    const auto counted = [&](int i) {
        const int at = 4 * (i / 2) + 2 * q + i % 2;
        return limits.beyond_row(dot[at], s, at) ? masked_dot(scale) : dot[at];
    };
    float top = masked_dot(scale);
#pragma unroll
    for (int i = 0; i < 2 * GROUPS; ++i) top = larger(top, counted(i), scale);
    top = larger(top, shuffle_xor(top, 1), scale);
    reference = reference_of(larger(top, shuffle_xor(top, 2), scale), scale);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * GROUPS; ++i) sum += exp2_fast(fmaf(counted(i), scale, -reference));
    return row_total(sum);
}

// Sums of each row and column against its own maximum, with two exponentials per element. Outputs as guarded_sums.
template <int STRIPS, int GROUPS, class L>
__device__ __forceinline__ void own_sums(const float (&dot)[STRIPS][4 * GROUPS], float scale, int lane,
                                         float (&row)[STRIPS][2], float (&row_reference)[STRIPS][2], float* column,
                                         float* reference, const L& limits) {
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
#pragma unroll
        for (int q = 0; q < 2; ++q) row[s][q] = own_row_sum<GROUPS>(dot[s], s, q, scale, limits, row_reference[s][q]);
#pragma unroll
    for (int i = 0; i < 2 * GROUPS; ++i) {
        const auto counted = [&](int s, int q) {
            const int at = 4 * (i / 2) + 2 * q + i % 2;
            return limits.beyond_column(dot[s][at], s, at) ? masked_dot(scale) : dot[s][at];
        };
        float top = masked_dot(scale);
#pragma unroll
        for (int s = 0; s < STRIPS; ++s) top = larger(top, larger(counted(s, 0), counted(s, 1), scale), scale);
#pragma unroll
        for (int bit = 16; bit > 2; bit /= 2) top = larger(top, shuffle_xor(top, bit), scale);
        top = reference_of(top, scale);
        float sum = 0.0f;
#pragma unroll
        for (int s = 0; s < STRIPS; ++s)
            sum += exp2_fast(fmaf(counted(s, 0), scale, -top)) + exp2_fast(fmaf(counted(s, 1), scale, -top));
        sum = column_total(sum);
        if (lane < 4) {
            column[8 * (i / 2) + 2 * lane + i % 2] = sum;
            reference[8 * (i / 2) + 2 * lane + i % 2] = top;
        }
    }
}

// Statistics of x = dot scale that are right for any logits: sums of 2^(x - reference), and their references.
//
// Rows: [strip][q]. Columns: shared, each column of this warp. A fused multiply-add forms x - reference, so x is never
// rounded: large logits lose nothing.
// If the warp's logits spread over at most SPREAD, their maximum is the reference of all, and one exponential per element
// suffices. Otherwise each row and each column takes its own maximum, with two exponentials per element.
// The maxima ignore NaN; it comes out of the sums.
template <int STRIPS, int GROUPS, class L>
__device__ __forceinline__ void guarded_sums(const float (&dot)[STRIPS][4 * GROUPS], float scale, int lane,
                                             float (&row)[STRIPS][2], float (&row_reference)[STRIPS][2], float* column,
                                             float* reference, const L& limits) {
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
        high = fmaxf(high, shuffle_xor(high, bit));
        low = fminf(low, shuffle_xor(low, bit));
    }
    // infinity and NaN fail the comparison. All lanes agree; __all_sync tells the compiler so, which would spill otherwise
    if (__all_sync(WHOLE_WARP, fabsf(scale) * (high - low) <= SPREAD)) {
        const float top = scale >= 0.0f ? high * scale : low * scale;
        shared_sums<STRIPS, GROUPS>(dot, scale, -top, lane, row, column, limits);
        for_each_row<STRIPS>([&](int s, int q) { row_reference[s][q] = top; });
        for (int i = lane; i < 8 * GROUPS; i += 32) reference[i] = top;
        return;
    }
    own_sums<STRIPS, GROUPS>(dot, scale, lane, row, row_reference, column, reference, limits);
}

// A sum of 2^(x - reference).
struct Guarded {
    float sum, reference;
};

// Joins the guarded sums of one row or column over WARPS warps, `stride` floats apart. An empty sum is 0.
template <int WARPS>
__device__ __forceinline__ Guarded join_guarded(const float* sum, const float* reference, int stride) {
    float top = -infinity();
#pragma unroll
    for (int w = 0; w < WARPS; ++w)
        if (sum[w * stride] != 0.0f) top = fmaxf(top, reference[w * stride]);  // true for NaN
    top = finite_or_zero(top);
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w)
        if (sum[w * stride] != 0.0f) total += rescaled(sum[w * stride], reference[w * stride] - top);
    return {total, top};
}

// Which of a thread's values of group g belong to positive pairs: bit 4 s + e. `columns` as in admit.
template <int MASK, int STRIPS>
__device__ __forceinline__ unsigned positives_of(const PairRow (&rows)[STRIPS][2], const bool (&inside)[STRIPS][2],
                                                 const long long* ids, int g, int columns) {
    const longlong2 id = pair_of_ids<MASK>(ids, g);
    unsigned positive_bits = 0;
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int q = e >> 1, column = 8 * g + (e & 1);
            if (inside[s][q] && column < columns && pair_status<MASK>(rows[s][q], column, e & 1 ? id.y : id.x).positive)
                positive_bits |= 1u << (4 * s + e);
        }
    return positive_bits;
}

// The number of set bits in each of four pairs of bits, one byte per pair.
__device__ __forceinline__ unsigned set_of_pairs(unsigned bits) {
    unsigned pairs = (bits & 0x55) + (bits >> 1 & 0x55);
    pairs = (pairs | pairs << 12) & 0x000f000f;
    return (pairs | pairs << 6) & 0x03030303;
}

// Sums of the dots of positive pairs, and their counts (TARGET).
//
// row_*: [strip][q]. column_*: shared, of this warp. `columns` as in admit. Sums of dots are in two parts: the loss is the
// log-sum-exp less the mean of these logits, and for large and similar logits the rounding of a float sum would dominate.
// Counts are integers, those of four rows or of two columns in one register: a row has at most 8 GROUPS pairs.
template <int MASK, int STRIPS, int GROUPS>
__device__ __forceinline__ void positive_sums(const float (&dot)[STRIPS][4 * GROUPS], const PairRow (&rows)[STRIPS][2],
                                              const bool (&inside)[STRIPS][2], const long long* ids, int columns,
                                              int lane, float (&row_dot)[STRIPS][2], float (&row_dot_low)[STRIPS][2],
                                              float (&row_count)[STRIPS][2], float* column_dot, float* column_dot_low,
                                              float* column_count) {
    static_assert(8 * GROUPS < 256, "a count is a byte");
    TwoPart row[STRIPS][2];
    unsigned row_counts[STRIPS / 2] = {};
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        const unsigned positive_bits = positives_of<MASK, STRIPS>(rows, inside, ids, g, columns);
        TwoPart sum[2];
        unsigned count = 0;
        if (__any_sync(WHOLE_WARP, positive_bits != 0)) {
#pragma unroll
            for (int s = 0; s < STRIPS; ++s)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (positive_bits & 1u << (4 * s + e)) {
                        row[s][e >> 1] += dot[s][4 * g + e];
                        sum[e & 1] += dot[s][4 * g + e];
                    }
#pragma unroll
            for (int s = 0; s < STRIPS; s += 2) row_counts[s / 2] += set_of_pairs(positive_bits >> 4 * s);
            count = column_total<unsigned>(__popc(positive_bits & 0x5555) | __popc(positive_bits & 0xaaaa) << 16);
            sum[0] = column_total(sum[0]);
            sum[1] = column_total(sum[1]);
        }
        if (lane < 4) {
            *reinterpret_cast<float2*>(column_dot + 8 * g + 2 * lane) = make_float2(sum[0].high, sum[1].high);
            *reinterpret_cast<float2*>(column_dot_low + 8 * g + 2 * lane) = make_float2(sum[0].low, sum[1].low);
            *reinterpret_cast<float2*>(column_count + 8 * g + 2 * lane) = make_float2(count & 0xffff, count >> 16);
        }
    }
#pragma unroll
    for (int s = 0; s < STRIPS; s += 2)
#pragma unroll
        for (int bit = 1; bit < 4; bit *= 2) row_counts[s / 2] += __shfl_xor_sync(WHOLE_WARP, row_counts[s / 2], bit);
    for_each_row<STRIPS>([&](int s, int q) {
        row[s][q] = row_total(row[s][q]);
        row_dot[s][q] = row[s][q].high;
        row_dot_low[s][q] = row[s][q].rest();
        row_count[s][q] = static_cast<float>(row_counts[s / 2] >> 8 * (2 * (s % 2) + q) & 0xff);
    });
}

// Sums of 2^(x - reference) over positive pairs (TARGET). With SAFE each has its own maximum as reference. Otherwise
// -reference is `shift`, and no reference is written. Arguments as in positive_sums and guarded_sums.
template <int SAFE, int MASK, int STRIPS, int GROUPS>
__device__ __forceinline__ void positive_powers(const float (&dot)[STRIPS][4 * GROUPS],
                                                const PairRow (&rows)[STRIPS][2], const bool (&inside)[STRIPS][2],
                                                const long long* ids, int columns, float scale, float shift, int lane,
                                                float (&row)[STRIPS][2], float (&row_reference)[STRIPS][2],
                                                float* column, float* reference) {
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            row[s][q] = 0.0f;
            row_reference[s][q] = SAFE ? masked_dot(scale) : -shift;
        }
    if (SAFE) {
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            const unsigned positive_bits = positives_of<MASK, STRIPS>(rows, inside, ids, g, columns);
#pragma unroll
            for (int s = 0; s < STRIPS; ++s)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (positive_bits & 1u << (4 * s + e))
                        row_reference[s][e >> 1] = larger(row_reference[s][e >> 1], dot[s][4 * g + e], scale);
        }
#pragma unroll
        for (int s = 0; s < STRIPS; ++s)
#pragma unroll
            for (int q = 0; q < 2; ++q) {
                float top = row_reference[s][q];
                top = larger(top, shuffle_xor(top, 1), scale);
                row_reference[s][q] = reference_of(larger(top, shuffle_xor(top, 2), scale), scale);
            }
        asm volatile("" ::: "memory");  // else the bits of all groups stay in registers, and spill
    }
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        const unsigned positive_bits = positives_of<MASK, STRIPS>(rows, inside, ids, g, columns);
        float sum[2] = {0.0f, 0.0f}, top[2] = {0.0f, 0.0f};
        if (__any_sync(WHOLE_WARP, positive_bits != 0)) {
            if (SAFE) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    top[c] = masked_dot(scale);
#pragma unroll
                    for (int s = 0; s < STRIPS; ++s)
#pragma unroll
                        for (int e = c; e < 4; e += 2)
                            if (positive_bits & 1u << (4 * s + e)) top[c] = larger(top[c], dot[s][4 * g + e], scale);
#pragma unroll
                    for (int bit = 16; bit > 2; bit /= 2) top[c] = larger(top[c], shuffle_xor(top[c], bit), scale);
                    top[c] = reference_of(top[c], scale);
                }
            }
#pragma unroll
            for (int s = 0; s < STRIPS; ++s)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (positive_bits & 1u << (4 * s + e)) {
                        const float x = dot[s][4 * g + e];
                        const float power = SAFE ? exp2_fast(fmaf(x, scale, -row_reference[s][e >> 1]))
                                                 : exact_power(x, scale, shift);
                        row[s][e >> 1] += power;
                        sum[e & 1] += SAFE ? exp2_fast(fmaf(x, scale, -top[e & 1])) : power;
                    }
#pragma unroll
            for (int c = 0; c < 2; ++c) sum[c] = column_total(sum[c]);
        }
        if (lane < 4) {
            *reinterpret_cast<float2*>(column + 8 * g + 2 * lane) = make_float2(sum[0], sum[1]);
            if (SAFE) *reinterpret_cast<float2*>(reference + 8 * g + 2 * lane) = make_float2(top[0], top[1]);
        }
    }
    for_each_row<STRIPS>([&](int s, int q) { row[s][q] = row_total(row[s][q]); });
}

}  // namespace contrastile
