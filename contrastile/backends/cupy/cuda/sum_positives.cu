// Sums and log-sum-exps by column of the logits of positives that indices name.
#include "features.cuh"

namespace contrastile {

// Column j sums the logits of the rows whose positive it is, in their order. The log-sum-exp of one logit is that logit.
//
// Each block owns 256 columns and reads all positives, 1024 rows per round. Few rows name one of its columns. The block
// lists these in order, and the thread of each column walks the list.
extern "C" __global__ void __launch_bounds__(256) sum_positives(const __grid_constant__ SumPositivesArguments a) {
    constexpr int ROUND = 1024;
    __shared__ int column_of[ROUND];
    __shared__ double logit_of[ROUND];
    __shared__ int counts[8];
    if (a.plan->off_diagonal == 0) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long first = 256ll * blockIdx.x;
    double total = 0.0, log = -infinity();
    long long found = 0;
    for (long long round = 0; round < a.m; round += ROUND) {
        // warp w takes rows 128 w .. 128 w + 127 of the round, so that the list is in the order of the rows
        int local[4], mine = 0;
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            const long long i = round + 128 * warp + 32 * step + lane;
            const long long j = i < a.m ? positive_column(a.positives[i], index_or_none(a.excluded, i), a.n) - first : -1;
            local[step] = j >= 0 && j < 256 ? static_cast<int>(j) : -1;
            mine += __popc(__ballot_sync(WHOLE_WARP, local[step] >= 0));
        }
        if (lane == 0) counts[warp] = mine;
        __syncthreads();
        int at = 0, count = 0;
        for (int w = 0; w < 8; ++w) {
            at += w < warp ? counts[w] : 0;
            count += counts[w];
        }
        if (mine != 0) {
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                const unsigned named_lanes = __ballot_sync(WHOLE_WARP, local[step] >= 0);
                if (local[step] >= 0) {
                    const int place = at + __popc(named_lanes & ((1u << lane) - 1));
                    column_of[place] = local[step];
                    logit_of[place] = a.row_sum[round + 128 * warp + 32 * step + lane];
                }
                at += __popc(named_lanes);
            }
        }
        __syncthreads();
        for (int k = 0; k < count; ++k) {
            if (column_of[k] != static_cast<int>(threadIdx.x)) continue;
            total += logit_of[k];
            log = merge(log, logit_of[k] * LOG2E);
            ++found;
        }
        // the next round writes counts before its first barrier, and the list only after it
    }
    const long long j = first + threadIdx.x;
    if (j >= a.n) return;
    a.column_sum[j] = total;
    a.column_lse[j] = found == 1 ? total : log * LN2;
}

}  // namespace contrastile
