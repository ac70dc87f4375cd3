// KV caches, and conversion between ragged and padded batches.
#include "torch/ops.h"
#include "torch/report.h"
#include "torch/tensor.h"

namespace tea::torch_ops {
namespace {

// Strides of [batch, seq, heads, dim], or of [tokens, heads, dim].
tea_strides strides_of(const char* name, const View& t) {
  if (t.rank != 3 && t.rank != 4)
    refuse(name, "of shape " + shape_text(t),
           "[batch, seqlen, heads, dim] or [tokens, heads, dim]");
  if (t.size[t.rank - 1] > 1 && t.stride[t.rank - 1] != 1)
    refuse(name, "strided in its last dimension", "stride 1 there (call .contiguous())");
  const int64_t *size = t.size + t.rank - 3, *stride = t.stride + t.rank - 3;
  tea_strides out{t.rank == 4 ? t.stride[0] : 0, stride[0], stride[1]};
  if (size[1] <= 1) out.head = size[2];
  if (size[0] <= 1) out.seq = size[1] * size[2];
  if (!out.batch && !out.seq && !out.head && t.elements()) frontend::refuse_expanded(name);
  return out;
}

int64_t batch_of(const Tensor& cu_seqlens) { return cu_seqlens.numel() - 1; }

struct AppendTensors {
  const Tensor &new_k, &new_v, &k_cache, &v_cache;
};

// All tensors have the type of k_cache, or new ones have a wider type and are cast to FP8.
void describe_types(tea_kv_append& args, const Place& place, const AppendTensors& of) {
  args.dtype = dtype_of(of.k_cache);
  const std::pair<const char*, const Tensor&> others[] = {
      {"new_k", of.new_k}, {"new_v", of.new_v}, {"v_cache", of.v_cache}};
  const bool is_fp8 = frontend::is_fp8(args.dtype);
  const int32_t new_type = dtype_of(of.new_k);
  const bool casts = is_fp8 && new_type <= TEA_FP32;
  args.new_dtype = casts ? new_type : TEA_DTYPE_DEFAULT;
  for (const auto& [name, t] : others) {
    const bool is_new = &t != &of.v_cache;
    if (dtype_of(t) != (casts && is_new ? new_type : args.dtype))
      refuse(std::string(name) + ".dtype", dtype_text(t),
             casts && is_new ? "that of new_k, " + dtype_text(of.new_k)
                             : "that of k_cache, " + dtype_text(of.k_cache) +
                                   (is_fp8 ? ", or float16, bfloat16 or float32" : ""));
    if (device_of(name, t) != place.where.device)
      refuse(name, "on another device", "that of k_cache");
  }
}

void add_scales(tea_kv_append& args, const Place& place, const std::optional<Tensor>& k_descale,
                const std::optional<Tensor>& v_descale) {
  const std::tuple<const char*, const std::optional<Tensor>&, const float*&> scales[] = {
      {"k_descale", k_descale, args.k_scale_inv}, {"v_descale", v_descale, args.v_scale_inv}};
  int64_t numbers = 0;  // of the first that is given
  for (const auto& [name, scale, to] : scales) {
    if (!scale) continue;
    numbers = frontend::require_cache_scales(name, View(*scale), args.heads, numbers);
    to = place.fp32(name, *scale);
  }
  if (numbers > 1) args.kv_scale = TEA_KV_SCALE_HEAD;
}

}  // namespace

void kv_cache_append(Stack& stack) {
  const Tensor new_k = stack.tensor(), new_v = stack.tensor(), k_cache = stack.tensor(),
               v_cache = stack.tensor();
  const std::optional<Tensor> page_table = stack.maybe_tensor();
  const Tensor cu_new = stack.tensor(), cu_cached = stack.tensor();
  const bool reindex = stack.flag();
  const std::optional<Tensor> k_descale = stack.maybe_tensor(), v_descale = stack.maybe_tensor();
  const Place place("k_cache", k_cache);
  const View k(new_k), v(new_v), cache_k(k_cache), cache_v(v_cache);
  if (cache_k.rank != 4 || cache_v.rank != 4)
    refuse("k_cache", "of shape " + shape_text(cache_k), "[pages, page_size, heads, dim]");
  auto args = sized<tea_kv_append>();
  describe_types(args, place, {new_k, new_v, k_cache, v_cache});
  const bool dense = k.rank == 4;
  args.new_form = dense ? TEA_DENSE : TEA_RAGGED;
  args.reindex = reindex;
  args.new_k_stride = strides_of("new_k", k), args.new_v_stride = strides_of("new_v", v);
  args.k_cache_stride = strides_of("k_cache", cache_k);
  args.v_cache_stride = strides_of("v_cache", cache_v);
  args.new_k = k.data, args.new_v = v.data, args.k_cache = cache_k.data,
  args.v_cache = cache_v.data;
  args.cu_new = place.int32("cu_new", cu_new);
  args.cu_cached = place.int32("cu_cached", cu_cached);
  args.batch = batch_of(cu_new);
  if (batch_of(cu_cached) != args.batch)
    refuse("cu_cached", "of shape " + shape_text(View(cu_cached)), "the shape of cu_new");
  args.heads = cache_k.size[2], args.dim_k = cache_k.size[3], args.dim_v = cache_v.size[3];
  const bool fits = k.rank == v.rank && k.size[k.rank - 2] == args.heads &&
                    k.size[k.rank - 1] == args.dim_k && v.size[v.rank - 2] == args.heads &&
                    v.size[v.rank - 1] == args.dim_v && k.size[0] == v.size[0] &&
                    k.size[k.rank - 3] == v.size[v.rank - 3];
  if (!fits)
    refuse("new_k, new_v", shape_text(k) + ", " + shape_text(v),
           "heads and dims of the caches, " + shape_text(cache_k) + ", " + shape_text(cache_v));
  args.max_new = dense ? k.size[1] : 0, args.tokens_new = dense ? 0 : k.size[0];
  args.batch_new = dense ? k.size[0] : 0;
  args.pages = cache_k.size[0], args.page_size = cache_k.size[1];
  if (cache_v.size[0] != args.pages || cache_v.size[1] != args.page_size ||
      cache_v.size[2] != args.heads)
    refuse("v_cache", "of shape " + shape_text(cache_v), "the pages, slots and heads of k_cache");
  add_scales(args, place, k_descale, v_descale);
  if (page_table) {
    const View table(*page_table);
    args.page_table = place.int32("page_table", *page_table);
    args.pages_per_sequence = table.rank == 2 ? table.size[1] : 1;
    const bool has_rows = (table.rank == 1 || table.rank == 2) && table.size[0] >= args.batch;
    if (!has_rows || args.pages_per_sequence < 1)  // 0 means 1 in the C API
      refuse("page_table", "of shape " + shape_text(table),
             "a row of pages for each of " + std::to_string(args.batch) + " sequences");
  }
  run_reported(tea_kv_cache_append, args, cu_new, place.where, "cu_new or cu_cached");
}

namespace {

// Both directions. `thd` and `bshd` are input and output, or the reverse.
void convert(tea_status (*verb)(const tea_thd_convert*, int, void*), const Tensor& input,
             const Tensor& output, bool to_bshd, const Tensor& cu_seqlens,
             const std::optional<Tensor>& offsets) {
  const Place place("input", input);
  const View from(input), to(output), &thd = to_bshd ? from : to, &bshd = to_bshd ? to : from;
  auto args = sized<tea_thd_convert>();
  args.dtype = dtype_of(input);
  args.zero_fill = 1;
  args.input = from.data, args.output = to.data;
  args.cu_seqlens = place.int32("cu_seqlens", cu_seqlens);
  if (offsets) args.offsets = place.int32("offsets", *offsets);
  if (offsets && offsets->numel() < bshd.size[0])
    refuse("offsets", "of shape " + shape_text(View(*offsets)),
           "the first token of each of " + std::to_string(bshd.size[0]) + " sequences");
  args.batch = bshd.size[0], args.seqlen = bshd.size[1], args.tokens = thd.size[0];
  args.heads = thd.size[1], args.dim = thd.size[2];
  args.thd_stride = strides_of("thd", thd), args.bshd_stride = strides_of("bshd", bshd);
  run_reported(verb, args, cu_seqlens, place.where);
}

void require_rank(const char* name, const Tensor& t, int rank) {
  if (t.dim() != rank)
    refuse(name, "of shape " + shape_text(View(t)), std::to_string(rank) + " dimensions");
}

}  // namespace

void thd_to_bshd(Stack& stack) {
  const Tensor thd = stack.tensor(), cu_seqlens = stack.tensor();
  const std::optional<Tensor> offsets = stack.maybe_tensor();
  const int64_t max_seqlen = stack.integer();
  require_rank("thd", thd, 3);
  const Tensor out = empty(thd, torch_dtype(dtype_of(thd)),
                           {batch_of(cu_seqlens), max_seqlen, thd.size(1), thd.size(2)});
  convert(tea_thd_to_bshd, thd, out, true, cu_seqlens, offsets);
  stack.give(out);
}

void bshd_to_thd(Stack& stack) {
  const Tensor bshd = stack.tensor(), cu_seqlens = stack.tensor();
  const std::optional<Tensor> offsets = stack.maybe_tensor();
  const int64_t tokens = stack.integer();
  require_rank("bshd", bshd, 4);
  if (batch_of(cu_seqlens) != bshd.size(0))
    refuse("cu_seqlens", "of shape " + shape_text(View(cu_seqlens)), "batch + 1 entries");
  const Tensor out = empty(bshd, torch_dtype(dtype_of(bshd)), {tokens, bshd.size(2), bshd.size(3)});
  convert(tea_bshd_to_thd, bshd, out, false, cu_seqlens, offsets);
  stack.give(out);
}

void cu_seqlens_from_lengths(Stack& stack) {
  const Tensor lengths = stack.tensor();
  const Place place("lengths", lengths);
  const Tensor out = empty(lengths, torch_int32(), {lengths.numel() + 1});
  auto args = sized<tea_cu_seqlens>();
  args.lengths = place.int32("lengths", lengths);
  args.cu_seqlens = place.int32("cu_seqlens", out);
  args.batch = lengths.numel();
  run_reported(tea_cu_seqlens_fill, args, lengths, place.where, "lengths");
  stack.give(out);
}

void cu_seqlens_from_mask(Stack& stack) {
  const Tensor mask = stack.tensor();
  const bool marks_tokens = stack.flag();
  const Place place("mask", mask);
  require_rank("mask", mask, 2);
  const Tensor out = empty(mask, torch_int32(), {mask.size(0) + 1});
  auto args = sized<tea_cu_seqlens>();
  args.mask_marks_tokens = marks_tokens;
  args.mask = place.as<const uint8_t>("mask", mask, torch_bool());
  args.cu_seqlens = place.int32("cu_seqlens", out);
  args.batch = mask.size(0), args.seqlen = mask.size(1);
  run_reported(tea_cu_seqlens_fill, args, mask, place.where);
  stack.give(out);
}

}  // namespace tea::torch_ops
