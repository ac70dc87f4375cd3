// A kernel of the forward pass on sm_90a for 16-bit types: FlashAttention-3's plan (Shah et al.,
// 2024) in the words of device/.
//
// A block of threads stays on its processor and takes tile after tile; a tile is 64 query rows for
// each of its consumer warpgroups, of one head. Warpgroup 0 serves the others: the planner claims
// tiles and describes them (forward_work.cuh), the producer copies Q, and K and V in blocks of
// `cols` keys, last block first, through rings, the porter has O leave, and the caretaker sees to
// what no tile covers.
//
//   producer     K3 Q | K2 V3 | K1 V2 | K0 V1 | V0 | K3 Q of the next tile
//   consumer 0   S3    | S2 and O += P3 V3, softmax 2 | S1 and O += P2 V2, softmax 1 | ...
//   consumer 1           S3 | ... half a step later, so that one has the matrix units while the
//                other does softmax: with `turns`, named barriers pass the turn around.
#pragma once
#include <type_traits>

#include "gpu/early.cuh"
#include "hopper/device/wgmma.cuh"
#include "hopper/forward_load.cuh"

namespace tea::hopper {

constexpr int kFirstTurn = 1;   // named barriers, one per consumer
constexpr int kAhead = 6;       // exponentials of a thread before it waits for the values
constexpr int kLateRounds = 6;  // rounds of tiles, at the end of a launch, that are claimed late

template <Config C>
struct Kernel {
  using S = Shared<C>;
  using Smem = typename S::Smem;
  static constexpr int kDim = S::kDim, kDimV = S::kDimV, kCols = S::kCols, kStages = S::kStages;
  static constexpr int kConsumers = S::kConsumers, kRows = S::kRows, kThreads = S::kThreads;
  static constexpr int kSlab = S::kSlab, kSlabDim = S::kSlabDim;
  static constexpr Swizzle kSwizzle = S::kSwizzle;
  // Of descriptors; it is here that the assembler has no registers left.
  static constexpr Sum kSum = C.kind == Kind::kMasked && kDim > 128 ? Sum::kLow : Sum::kWide;
  using Scores = float[kCols / 2];
  using Weights = uint32_t[kCols / 16][4];
  using Output = float[kDimV / 2];

  // Null where tiles are not claimed.
  static TEA_DEVICE Claims* claims_of(const Parameters& p) {
    return static_cast<Claims*>(p.f.counter);
  }

  // A warp that claims tiles, and describes them to everybody else.
  struct Planner {
    const Parameters& p;
    Smem& s;
    const int blocks = static_cast<int>(gridDim.x);  // read at the start: see hopper-forward.md
    const int certain = Tiles<kRows, C.masked()>::certain(p.f, p.order);
    Position<2> at_mail{};

    // By one thread.
    TEA_DEVICE void draft(const Tile& t) {
      Work& w = s.draft;
      const bool searched = p.f.queries.form != Form::kDense;
      const Common common = p.alike    ? p.common
                            : searched ? s.window[t.batch % 32]
                                       : common_of(p.f, t.batch);
      describe<kRows, kCols>(w, p.f, common, p.group, t);
      if constexpr (C.row.apart) share_out<kRows, kCols>(w);
      if constexpr (C.general() || C.dropped()) add_origin(w, p.f);
      if constexpr (C.general()) add_general(w, p.f);
      if constexpr (C.dropped()) add_dropout(w, p.f);
    }
    // What the other roles read next, by one thread. The draft is ready when there is a place.
    TEA_DEVICE void post() {
      constexpr bool kAll = C.row.apart || C.general() || C.dropped();
      constexpr size_t kBytes = kAll ? sizeof(Work) : sizeof(AnyWork);  // what the kernel reads
      auto* const to = reinterpret_cast<uint4*>(&s.mail.blank(at_mail));
      const auto* const from = reinterpret_cast<const uint4*>(&s.draft);
#pragma unroll 2  // in few registers
      for (int i = 0; i < static_cast<int>((kBytes + 15) / 16); ++i) to[i] = from[i];
      s.mail.post(at_mail);
    }
    // A claim before its message has a place is a tile that waits here, while other blocks may have
    // none; but a late one may come too late to be described and loaded during the tile before. So
    // claims are early while there are tiles for all, and after tiles of one block.
    TEA_DEVICE bool may_claim_early(int number) {
      const int length = s.draft.blocks.end - s.draft.blocks.begin;
      return length <= 1 || number + kLateRounds * blocks < certain;
    }
    // Before the first claim: until then the counter's memory is the kernel's before.
    TEA_DEVICE void enter(Claims& claims) {
      wait_for_kernel_before();
      claims.enter(p.launch);
    }
    // The number of the tile after this one, by one thread.
    TEA_DEVICE int next(int number) {
      Claims* const claims = claims_of(p);
      if (!claims) return blocks + number;
      if (number < blocks) enter(*claims);
      if (!may_claim_early(number)) s.mail.ring.wait_empty(at_mail);
      return blocks + claims->claim();
    }
    TEA_DEVICE void run() {
      Tiles<kRows, C.masked()> tiles{p.f, p.order, p.steps, s.window};
      int number = static_cast<int>(blockIdx.x);
      Tile t;
      while (tiles.find(number, t)) {
        __syncwarp();  // for the window
        if (lane() == 0) {
          draft(t);
          post();
          number = next(number);
        }
        number = __shfl_sync(0xffffffff, number, 0);
      }
      if (lane() > 0) return;
      let_next_begin();
      s.draft.head = -1;  // everybody stops
      post();
      if (Claims* const claims = claims_of(p)) {
        if (number < blocks) enter(*claims);
        claims->leave();
      }
    }
  };

  struct Consumer {
    const Parameters& p;
    Smem& s;
    const int number;
    Position<C.row.q_stages> at_q{};
    Position<kStages> at_k{}, at_v{};
    Position<2> at_mail{};
    Position<1> at_bias{}, at_o{};

    // What a consumer carries from block to block, in registers.
    struct State {
      Output o;
      Scores scores;
      Weights weights;
      OnlineSoftmax softmax;
      float shrink[2];
    };

    static TEA_DEVICE void clear(Output& o) {
#pragma unroll
      for (int i = 0; i < kDimV / 2; ++i) o[i] = 0;
    }
    TEA_DEVICE int first_row(const Work& w) { return w.first + 64 * number; }

    TEA_DEVICE void wait_turn() {
      if constexpr (C.row.turns) named_sync(kFirstTurn + number, 256);
    }
    TEA_DEVICE void pass_turn() {
      if constexpr (C.row.turns)
        named_arrive(kFirstTurn + (number + 1 == kConsumers ? 0 : number + 1), 256);
    }
    // The matrix units have read it; one thread of each warp says so.
    template <int kDepth>
    TEA_DEVICE void release(Ring<kDepth>& ring, Position<kDepth>& at) {
      if (lane() == 0) ring.release(at);
      at.advance();
    }
    // What nobody reads. Where nothing between gathers the warp, a lane that still waits would wait
    // for ever once the others have let go: the stage is filled again, and the phase is over.
    template <int kDepth>
    TEA_DEVICE void pass_on(Ring<kDepth>& ring, Position<kDepth>& at) {
      ring.wait_full(at);
      __syncwarp();
      release(ring, at);
    }

    // scores = q k^T, issued; K is there.
    TEA_DEVICE void multiply_qk(Scores& scores, Position<C.row.q_stages> of_q) {
      const uint64_t left = descriptor(s.q[of_q.stage][number], kSwizzle);
      const uint64_t right = descriptor(s.k[at_k.stage], kSwizzle);
      matrix_fence();
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        const int slab = step * 32 / kSlab, at = step * 32 % kSlab;
        multiply<Shape{kCols, C.type, C.type}>(scores, advanced<kSum>(left, slab * 64 * kSlab + at),
                                               advanced<kSum>(right, slab * kCols * kSlab + at),
                                               step > 0);
      }
      matrix_commit();
    }
    // o += p v, issued.
    TEA_DEVICE void multiply_pv(Output& o, const Weights& weights) {
      s.ring_v.wait_full(at_v);
      const uint64_t right = descriptor(s.v[at_v.stage], kSwizzle, kCols * kSlab);
      pin(o);
      matrix_fence();
#pragma unroll
      for (int step = 0; step < kCols / 16; ++step)
        multiply<Shape{kDimV, C.type, C.type, Major::kSummed, Major::kOuter}>(
            o, weights[step], advanced<kSum>(right, step * 16 * kSlab), true);
      matrix_commit();
    }

    // What is done with the bias of a block, once it is there. rows: bias_rows().
    template <class Use>
    TEA_DEVICE void with_bias(int rows, Use&& use) {
      if constexpr (C.biased())
        if (rows) {
          s.ring_bias[number].wait_full(at_bias);
          use(BiasTile{s.bias[number], rows});
          __syncwarp();
          return release(s.ring_bias[number], at_bias);
        }
      use(BiasTile{});
    }
    // Which of a thread's elements of a block are seen.
    TEA_DEVICE void see(uint32_t (&seen)[2], const Work& w, int block) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Blocks c = w.columns_of(first_row(w) + row_of(2 * r));
        seen[r] = columns_between<kCols>(c.begin - block * kCols, c.end - block * kCols);
      }
    }
    // From products to scores; what a row does not see becomes -infinity. highest: of the thread's
    // rows. all_seen: blocks that all rows see in full.
    TEA_DEVICE void shape(Scores& scores, const Work& w, int block, Blocks all_seen,
                          float (&highest)[2]) {
      const bool all = block >= all_seen.begin && block < all_seen.end;
      uint32_t seen[2] = {~0u, ~0u};
      if (!all) see(seen, w, block);
      if constexpr (C.general())
        if (bends(p.f)) {
          const int row = first_row(w) + row_of(0), column = block * kCols + column_of(0);
#pragma unroll
          for (int r = 0; r < 2; ++r)
            if (row + 8 * r >= w.rows) seen[r] = 0;  // a bias has no such row
          with_bias(S::bias_rows(p, w), [&](const BiasTile& bias) {
            bend<C.type, C.biased()>(scores, p.f, w, {row, column}, seen, bias, highest);
          });
        }
      if (!all) hide(scores, seen);
      if (!C.general() || !caps_last(p.f)) thread_row_max(scores, highest);
    }
    static TEA_DEVICE void hide(Scores& scores, const uint32_t (&seen)[2]) {
      // Elsewhere that order moved a wait in the loop without a mask, before follow() held it
      // there; what it does now was not measured.
      if constexpr (C.row.apart || C.row.halves) {
        hide_unseen(scores, seen);
      } else {
#pragma unroll
        for (int i = 0; i < kCols / 2; ++i)
          if (!(seen[half_of(i)] >> number_in_row(i) & 1)) scores[i] = kMinusInfinity;
      }
    }
    // From products to weights, before they are rounded. kShapes: some row may not see all.
    // collect: waits for the values of the block before.
    template <bool kShapes, class Collect>
    TEA_DEVICE void soften(State& x, const Work& w, int block, Blocks all_seen, Collect&& collect) {
      if constexpr (C.capped()) return soften_capped<kShapes>(x, w, block, all_seen, collect);
      float highest[2];
      if constexpr (kShapes)
        shape(x.scores, w, block, all_seen, highest);
      else
        thread_row_max(x.scores, highest);
      x.softmax.update(x.scores, highest, p.scale_log2, x.shrink);
      collect();
    }
    // The first block of a tile, seen before. A warp of whose rows none sees the second half, as
    // where a causal mask ends, has no exponentials there.
    TEA_DEVICE void soften_first(State& x, const uint32_t (&seen)[2], bool half) {
      float highest[2];
      if (half) {
        float part[kCols / 4];
#pragma unroll
        for (int i = 0; i < kCols / 4; ++i) part[i] = x.scores[i];
        hide_unseen(part, seen);
        thread_row_max(part, highest);
        x.softmax.update(part, highest, p.scale_log2, x.shrink);
#pragma unroll
        for (int i = 0; i < kCols / 2; ++i) x.scores[i] = i < kCols / 4 ? part[i % (kCols / 4)] : 0;
      } else {
        hide_unseen(x.scores, seen);
        thread_row_max(x.scores, highest);
        x.softmax.update(x.scores, highest, p.scale_log2, x.shrink);
      }
    }
    // The same under a cap alone. Scaling O hides behind the exponentials, which lie in branches:
    // the assembler cannot put it there itself.
    template <bool kShapes, class Collect>
    TEA_DEVICE void soften_capped(State& x, const Work& w, int block, Blocks all_seen,
                                  Collect&& collect) {
      uint32_t seen[2] = {~0u, ~0u};
      if (kShapes && !(block >= all_seen.begin && block < all_seen.end)) {
        see(seen, w, block);
        hide(x.scores, seen);
      }
      CappedBlock b;
      b.raise(p.cap, x.softmax, x.scores, seen, p.scale_log2, x.shrink);
      collect();
      b.exponentials(p.cap, x.scores, seen);
      thread_row_sum(x.scores, x.softmax.sum);
    }
    // To probabilities in 16 bits, of which dropout takes some after they were summed.
    TEA_DEVICE void weigh(State& x, const Work& w, int block) {
      const Corner at = {first_row(w) + row_of(0), block * kCols + column_of(0)};
      if constexpr (C.general())
        if (p.f.general.dropout > 0) drop(x.scores, p.f, w, at);
#pragma unroll
      for (int c = 0; c < kCols / 16; ++c) columns_as_operand<C.type>(x.weights[c], x.scores, c);
      if constexpr (C.dropped()) drop(x.weights, p.f, w, at);
    }

    // Hands back blocks that none of the consumer's rows sees. Every block of a tile has a turn,
    // since the others count on it.
    TEA_DEVICE void skip(int count, int rows_of_bias) {
      for (int i = 0; i < count; ++i) {
        pass_on(s.ring_k, at_k);
        with_bias(rows_of_bias, [](const BiasTile&) {});
        if constexpr (!C.row.apart) skip_turn();
        pass_on(s.ring_v, at_v);
      }
    }
    TEA_DEVICE void skip_turn() {
      wait_turn();
      pass_turn();
    }
    // The first `count` where consumers may be apart. All have as many turns, which need not be one
    // for each block: `turns` are those of which this one has no use. The values of the last block
    // stay, since they come behind the keys of the next.
    TEA_DEVICE void skip_first(int count, int turns) {
#pragma unroll 1
      for (int i = 0; i < max(count, turns); ++i) {
        if (i < count) pass_on(s.ring_k, at_k);
        if (i < turns) skip_turn();
        if (i + 1 < count) pass_on(s.ring_v, at_v);
      }
    }

    // The first element of a row of the tile's sequence.
    template <class T>
    TEA_DEVICE T* place(const Strided& x, const Work& w, int row) {
      return static_cast<T*>(x.data) + S::batch_of(p.f.queries, w) * x.batch + w.head * x.head +
             int64_t{w.start + row} * x.row;
    }
    // A number for each of the thread's rows, which are eight apart.
    TEA_DEVICE void report(const Strided& to, const Work& w, float first, float second) {
      if (!to.data) return;
      const int row = first_row(w) + row_of(0);
      float* const at = place<float>(to, w, row);
      if (row < w.rows) at[0] = first;
      if (row + 8 < w.rows) at[8 * to.row] = second;
    }
    // A pair of neighbours in a row, normalised. A row that sees nothing stays clean of others.
    static TEA_DEVICE uint32_t normalised(const Output& o, int at, float factor) {
      uint32_t pair = pack<C.type>(o[at] * factor, o[at + 1] * factor);
      if (factor == 0) pair = 0;
      return pair;
    }
    // Row r of the thread's two. Neighbours swap pairs of columns, so that each has four in a row
    // and a quad has sixteen: what a cache writes at once.
    TEA_DEVICE void write_row(const Output& o, const Work& w, int r, float factor) {
      const int row = first_row(w) + row_of(2 * r);
      const bool odd = lane() % 2;
      uint16_t* const to = place<uint16_t>(p.f.o, w, row) + odd * 8 + lane() / 2 % 2 * 4;
#pragma unroll
      for (int c = 0; c < kDimV / 16; ++c) {
        uint32_t pair[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) pair[i] = normalised(o, 8 * c + 4 * i + 2 * r, factor);
        const uint32_t got = __shfl_xor_sync(0xffffffff, odd ? pair[0] : pair[1], 1);
        if (row < w.rows && 16 * c + odd * 8 < p.f.dim_v)
          *reinterpret_cast<uint2*>(to + 16 * c) = uint2{odd ? got : pair[0], odd ? pair[1] : got};
      }
    }
    // All of it to shared memory, from where the porter takes it.
    TEA_DEVICE void hand_over(const Output& o, const float (&factor)[2]) {
      Ring<1>& ring = s.ring_o[number];
      const int row = 16 * warp_of_group() + lane() % 16;
      ring.wait_empty(at_o);
#pragma unroll
      for (int c = 0; c < kDimV / 16; ++c) {
        const int slab = c * 32 / kSlab, at = c * 32 % kSlab;
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = normalised(o, 8 * c + 2 * i, factor[i % 2]);
        store_matrices(shared_address(s.o[number]) + slab * 64 * kSlab +
                           swizzled(kSwizzle, row, at + lane() / 16 * 16),
                       a);
      }
      fence_shared_to_async();
      __syncwarp();
      if (lane() == 0) arrive(ring.full[at_o.stage]);
      at_o.advance();
    }
    // What becomes of the thread's rows, and what is said of them.
    using Ends = OnlineSoftmax::Ends;
    TEA_DEVICE Ends conclude(const OnlineSoftmax& softmax, const Work& w) {
      const Ends end = softmax.finish(p.unit, w.sink);
      if (lane() % 4 == 0) {
        report(p.f.lse, w, end.row[0].lse, end.row[1].lse);
        report(p.f.max, w, end.row[0].max, end.row[1].max);
        report(p.f.sum_exp, w, end.row[0].sum_exp, end.row[1].sum_exp);
      }
      return end;
    }
    // The normalised rows of a tile leave, and the tile is over.
    TEA_DEVICE void finish(const Output& o, const Ends& end, const Work& w) {
      const float kept = C.general() || C.dropped() ? 1 / (1 - p.f.general.dropout) : 1;
      const float factor[2] = {end.row[0].factor * kept, end.row[1].factor * kept};
      if constexpr (C.row.staged)
        hand_over(o, factor);
      else
#pragma unroll
        for (int r = 0; r < 2; ++r) write_row(o, w, r, factor[r]);
      s.mail.ring.release(at_mail);  // by all threads, each of which has read it
      at_mail.advance();
    }

    // The values of a tile's last block; what needs no values is done beside them.
    TEA_DEVICE void close(State& x, const Work& w) {
      if constexpr (C.row.rescale_early) scale_rows(x.o, x.shrink);
      multiply_pv(x.o, x.weights);
      const Ends end = conclude(x.softmax, w);
      matrix_wait<0>();
      pin(x.o);
      release(s.ring_v, at_v);
      finish(x.o, end, w);
    }
    // A tile of which none of the consumer's rows sees anything.
    TEA_DEVICE void pass_over(State& x, const Work& w) {
      pass_on(s.ring_q[number], at_q);
      const int count = w.blocks.end - w.blocks.begin;
      if constexpr (C.row.apart) {
        skip_first(count, w.turns);
        if (count > 0) pass_on(s.ring_v, at_v);
      } else {
        skip(count, S::bias_rows(p, w));
      }
      clear(x.o);
      x.softmax.start();
      finish(x.o, conclude(x.softmax, w), w);
    }

    // The first scores of a tile, with nothing beside them. Gives the blocks that all rows see.
    TEA_DEVICE Blocks begin(State& x, const Work& w, int block) {
      s.ring_k.wait_full(at_k);
      wait_turn();
      multiply_qk(x.scores, at_q);
      pass_turn();
      const Blocks all_seen = w.template clear_of<kCols>(first_row(w));
      uint32_t seen[2] = {~0u, ~0u};
      bool half = false;
      if constexpr (C.row.halves) {  // while the products run
        if (block < all_seen.begin || block >= all_seen.end) see(seen, w, block);
        half = !(__reduce_or_sync(0xffffffff, seen[0] | seen[1]) >> kCols / 8);
      }
      matrix_wait<0>();
      pin(x.scores);
      release(s.ring_k, at_k);
      x.softmax.start();
      if constexpr (C.row.halves)
        soften_first(x, seen, half);
      else
        soften<true>(x, w, block, all_seen, [] {});
      clear(x.o);
      weigh(x, w, block);
      return all_seen;
    }
    // The scores of a block beside the values of the one before. kShapes: some row may not see all.
    template <bool kShapes>
    TEA_DEVICE void step(State& x, const Work& w, int block, Blocks all_seen) {
      s.ring_k.wait_full(at_k);
      wait_turn();
      multiply_qk(x.scores, at_q);
      if constexpr (C.row.rescale_early) scale_rows(x.o, x.shrink);
      multiply_pv(x.o, x.weights);
      pass_turn();
      matrix_wait<1>();
      pin(x.scores);
      release(s.ring_k, at_k);
      soften<kShapes>(x, w, block, all_seen, [&] {
        follow(x.scores[kAhead], s.spare);
        matrix_wait<0>();
        pin(x.o);
        release(s.ring_v, at_v);
        if constexpr (!C.row.rescale_early) scale_rows(x.o, x.shrink);
      });
      weigh(x, w, block);
    }

    // The blocks of a tile that the consumer works on.
    TEA_DEVICE Blocks own_blocks(const Work& w) {
      if constexpr (!C.row.skips) return w.blocks;
      if constexpr (C.row.apart) return w.own[number];
      return w.template blocks_of<kCols>(first_row(w), 64);
    }
    TEA_DEVICE void attend(State& x, const Work& w) {
      const Blocks own = own_blocks(w);
      if (own.begin >= own.end) return pass_over(x, w);
      s.ring_q[number].wait_full(at_q);
      const int trail = own.begin - w.blocks.begin, rows_of_bias = S::bias_rows(p, w);
      int block = own.end - 1;
      const int lead = w.blocks.end - own.end;
      if constexpr (C.row.apart)
        skip_first(lead, w.turns - (own.end - own.begin));
      else
        skip(lead, rows_of_bias);
      const Blocks all_seen = begin(x, w, block);
      if constexpr (C.row.apart)
        if (lead > 0) pass_on(s.ring_v, at_v);
      const auto down_to = [&](int last, auto shapes) {
        for (; block > last; --block) step<shapes>(x, w, block - 1, all_seen);
      };
      if constexpr (C.masked() && !C.general()) {
        down_to(max(own.begin, all_seen.end), std::true_type());
        down_to(max(own.begin, all_seen.begin), std::false_type());
      }
      // Without a mask only the first block ends early; what bends scores does so in all of them.
      down_to(own.begin, std::bool_constant<C.masked()>());
      release(s.ring_q[number], at_q);
      close(x, w);
      skip(trail, rows_of_bias);  // the message is gone
    }

    TEA_DEVICE void run() {
      if (C.row.turns && number == kConsumers - 1) pass_turn();  // the first goes first
      State x;
      for (;;) {
        const Work& w = s.mail.read(at_mail);
        if (w.head < 0) break;
        attend(x, w);
      }
    }
  };

  static TEA_DEVICE void start(const Parameters& p, Smem& s) {
    for (const TensorMap* map : {&p.q, &p.k, &p.v}) prefetch(*map);
    if (C.row.staged) prefetch(p.o);
    if (C.biased() && p.bias_rows) prefetch(p.bias);
    for (auto& ring : s.ring_q) ring.start(1, 4);
    s.ring_k.start(1, 4 * kConsumers);
    s.ring_v.start(1, 4 * kConsumers);
    for (auto& ring : s.ring_bias) ring.start(1, 4);
    for (auto& ring : s.ring_o) ring.start(4, 1);
    s.mail.ring.start(1, 128 * kConsumers + (C.row.staged ? 2 : 1));
    publish_barriers();
  }
  // The slabs of Q and K that no load fills, by all threads.
  static TEA_DEVICE void clear_rest(const Parameters& p, Smem& s) {
    const auto clear = [&](uint8_t* tile, int height) {
      const int first = S::slabs_of(p.f.dim) * height * kSlab;
      for (int at = first + static_cast<int>(threadIdx.x) * 16; at < height * kDim * 2;
           at += kThreads * 16)
        *reinterpret_cast<uint4*>(tile + at) = uint4{};
    };
    for (auto& stage : s.q)
      for (auto& tile : stage) clear(tile, 64);
    for (auto& tile : s.k) clear(tile, kCols);
    fence_shared_to_async();
  }

  // Whether tiles can be described from what came with the launch, while the kernel before runs.
  static TEA_DEVICE bool foreseen(const Parameters& p) {
    return p.alike && p.f.sink != Sink::kTensor && !C.general() && !C.dropped();
  }
  // The first warpgroup. Consumers and the porter touch only what these threads have waited for.
  static TEA_DEVICE void serve(const Parameters& p, Smem& s, int warp) {
    constexpr int kBusy = C.row.staged ? 3 : 2, kFree = 128 - 32 * kBusy;
    if (warp == 0) {
      wait_for_kernel_before();
      if (elect_one()) Producer<C>{p, s}.run();
    } else if (warp == 1) {
      if (!foreseen(p)) wait_for_kernel_before();
      Planner{p, s}.run();
    } else if (warp < kBusy) {
      if constexpr (C.row.staged)
        if (elect_one()) Porter<C>{p, s}.run();
    } else {
      wait_for_kernel_before();
      const int mine = static_cast<int>(threadIdx.x) - 32 * kBusy;
      const int share = static_cast<int>(blockIdx.x) * kFree + mine;
      if (share == 0 && claims_of(p)) claims_of(p)->open(p.launch);
      Caretaker{p.f, share, static_cast<int>(gridDim.x) * kFree}.run();
    }
  }

  static TEA_DEVICE void body(const Parameters& p) {
    extern __shared__ __align__(1024) uint8_t memory[];
    Smem& s = *reinterpret_cast<Smem*>(memory);
    if (threadIdx.x == 0) start(p, s);
    if (S::slabs_of(p.f.dim) < kDim / kSlabDim) clear_rest(p, s);
    __syncthreads();
    const int group = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    if (group == 0) {
      // The warpgroups share what the launch gave them: 5 x 96, 4 x 128 or 3 x 168 registers a
      // thread. The planner spills below 32.
      shrink_registers<kConsumers == 2 ? 40 : 32>();
      serve(p, s, __shfl_sync(0xffffffff, threadIdx.x / 32, 0));
    } else {
      grow_registers<kConsumers == 4 ? 112 : kConsumers == 3 ? 160 : 232>();
      Consumer{p, s, group - 1}.run();
    }
  }
};

}  // namespace tea::hopper
