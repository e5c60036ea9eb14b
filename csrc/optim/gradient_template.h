// SPDX-License-Identifier: Apache-2.0
// The vector kernels over gradients, written once; included after update_template.h.

#define OFL_LANE_VECTORS (OFL_OPTIM_NORM_LANES * 2 / OFL_WIDTH)
/*
 * Vector i of the lanes holds lanes i * OFL_WIDTH / 2 and following; for bf16 vectors
 * 2*i and 2*i + 1 hold the even and the odd ones of twice as many, since these are had
 * from pairs of bf16 without moving anything between the lanes of a register.
 */
OFL_INLINE void load_lanes(const char *at, int dtype, hf out[OFL_LANE_VECTORS])
{
	for (int i = 0; i < OFL_LANE_VECTORS; i++) {
		const char *here = at + (size_t)i * (OFL_WIDTH / 2) * ofl_itemsize(dtype);

		if (dtype == OFL_OPTIM_F16)
			out[i] = hf_load_f16(here);
		else if (dtype == OFL_OPTIM_F32)
			out[i] = hf_load_f32((const float *)(const void *)here);
		else if (i % 2 == 0)
			hf_load_bf16_pairs(here, &out[i], &out[i + 1]);
	}
}

OFL_INLINE void store_lanes(const vd vectors[OFL_LANE_VECTORS], int dtype,
			    double lanes[OFL_OPTIM_NORM_LANES])
{
	double stored[OFL_OPTIM_NORM_LANES];

	for (int i = 0; i < OFL_LANE_VECTORS; i++)
		vd_store(stored + i * OFL_WIDTH / 2, vectors[i]);
	for (int i = 0; i < OFL_OPTIM_NORM_LANES; i++) {
		const int within = i % OFL_WIDTH;
		const int from =
			dtype == OFL_OPTIM_BF16
				? i - within + within / 2 + within % 2 * (OFL_WIDTH / 2)
				: i;

		lanes[i] = stored[from];
	}
}

/* Adds the squares of 16 elements, one per lane. */
OFL_INLINE void add_squares(vd lanes[OFL_LANE_VECTORS], const char *at, int dtype,
			    int is_scaled, hf k1, hf k2)
{
	hf values[OFL_LANE_VECTORS];

	load_lanes(at, dtype, values);
	for (int i = 0; i < OFL_LANE_VECTORS; i++) {
		hf g = values[i];

		if (is_scaled)
			g = hf_mul(hf_mul(g, k1), k2);
		/* The square is exact in float64: a fused operation rounds alike. */
		lanes[i] = vd_add_square(lanes[i], vd_from(g));
	}
}

/*
 * One block at a time, without software prefetch: two blocks at once, or a prefetch, kept
 * the hardware's own prefetcher from a rate that is that of a plain read.
 */
OFL_INLINE double norm_block(const char *at, int dtype, int is_scaled,
			     size_t num_elements, const float scales[2])
{
	const hf k1 = hf_set1(scales[0]), k2 = hf_set1(scales[1]);
	vd vectors[OFL_LANE_VECTORS];
	double lanes[OFL_OPTIM_NORM_LANES];

	for (int j = 0; j < OFL_LANE_VECTORS; j++)
		vectors[j] = vd_zero();
	for (; num_elements >= OFL_OPTIM_NORM_LANES;
	     num_elements -= OFL_OPTIM_NORM_LANES) {
		add_squares(vectors, at, dtype, is_scaled, k1, k2);
		at += OFL_OPTIM_NORM_LANES * ofl_itemsize(dtype);
	}
	store_lanes(vectors, dtype, lanes);
	for (size_t j = 0; j < num_elements; j++) {
		double g = (double)ofl_load_scaled(at, dtype, j, scales);

		lanes[j % OFL_OPTIM_NORM_LANES] += g * g;
	}
	return ofl_combine_lanes(lanes);
}

OFL_INLINE double norm_dtype(const char *at, int dtype, size_t num_elements,
			     const float scales[2])
{
	if (scales[0] == 1.0f && scales[1] == 1.0f)
		return norm_block(at, dtype, 0, num_elements, scales);
	return norm_block(at, dtype, 1, num_elements, scales);
}

static OFL_TARGET double norm(const void *values, int dtype, size_t num_elements,
			      const float scales[2])
{
	if (dtype == OFL_OPTIM_BF16)
		return norm_dtype(values, OFL_OPTIM_BF16, num_elements, scales);
	if (dtype == OFL_OPTIM_F16)
		return norm_dtype(values, OFL_OPTIM_F16, num_elements, scales);
	return norm_dtype(values, OFL_OPTIM_F32, num_elements, scales);
}

/* Plain loops, which the compiler turns into vectors of OFL_TARGET. */
OFL_INLINE uint64_t nonfinite_16(const uint16_t *bits, size_t num_elements,
				 uint16_t exponent)
{
	/* So few that a 16-bit counter holds them. */
	const size_t most = 32768;
	uint64_t total = 0;

	while (num_elements) {
		const size_t length = num_elements < most ? num_elements : most;
		uint16_t count = 0;

		for (size_t i = 0; i < length; i++)
			count = (uint16_t)(count + ((bits[i] & exponent) == exponent));
		total += count;
		bits += length;
		num_elements -= length;
	}
	return total;
}

static OFL_TARGET uint64_t nonfinite(const void *values, int dtype, size_t num_elements)
{
	const uint32_t *bits = values;
	uint32_t count = 0;

	if (dtype == OFL_OPTIM_BF16)
		return nonfinite_16(values, num_elements, 0x7f80);
	if (dtype == OFL_OPTIM_F16)
		return nonfinite_16(values, num_elements, 0x7c00);
	for (size_t i = 0; i < num_elements; i++)
		count += (bits[i] & 0x7f800000u) == 0x7f800000u;
	return count;
}

OFL_INLINE void store_rounded(void *array, int dtype, const vf values[2])
{
	const vi half = vi_set1(0x7fff), one = vi_set1(1);
	vi bits[2];

	if (dtype == OFL_OPTIM_F32) {
		vf_store((float *)array, values[0]);
		vf_store((float *)array + OFL_WIDTH, values[1]);
		return;
	}
	if (dtype == OFL_OPTIM_F16) {
		store_16(array, pack_f16(values[0], values[1]), 0);
		return;
	}
	for (int i = 0; i < 2; i++) {
		bits[i] = vf_as_vi(values[i]);
		/* To nearest even. */
		bits[i] = vi_add(vi_add(bits[i], half),
				 vi_and(vi_shift_right_16(bits[i]), one));
	}
	store_16(array, pack_high(bits[0], bits[1]), 0);
}

OFL_INLINE void accumulate_pair(char *sum, int sum_dtype, const char *gradient,
				int gradient_dtype, size_t num_elements)
{
	const size_t sum_size = ofl_itemsize(sum_dtype);
	const size_t gradient_size = ofl_itemsize(gradient_dtype);
	size_t i = 0;

	for (; num_elements - i >= OFL_STEP; i += OFL_STEP) {
		vf x[2], y[2];

		prefetch(sum + i * sum_size, sum_size);
		prefetch(gradient + i * gradient_size, gradient_size);
		load_values(sum + i * sum_size, sum_dtype, x);
		load_values(gradient + i * gradient_size, gradient_dtype, y);
		x[0] = vf_canonical(vf_add(x[0], y[0]));
		x[1] = vf_canonical(vf_add(x[1], y[1]));
		store_rounded(sum + i * sum_size, sum_dtype, x);
	}
	if (i < num_elements)
		ofl_optim_scalar.accumulate(sum + i * sum_size, sum_dtype,
					    gradient + i * gradient_size, gradient_dtype,
					    num_elements - i);
}

OFL_INLINE void accumulate_into(char *sum, int sum_dtype, const char *gradient,
				int gradient_dtype, size_t num_elements)
{
	if (gradient_dtype == OFL_OPTIM_BF16)
		accumulate_pair(sum, sum_dtype, gradient, OFL_OPTIM_BF16, num_elements);
	else if (gradient_dtype == OFL_OPTIM_F16)
		accumulate_pair(sum, sum_dtype, gradient, OFL_OPTIM_F16, num_elements);
	else
		accumulate_pair(sum, sum_dtype, gradient, OFL_OPTIM_F32, num_elements);
}

static OFL_TARGET void accumulate(void *sum, int sum_dtype, const void *gradient,
				  int gradient_dtype, size_t num_elements)
{
	if (sum_dtype == OFL_OPTIM_BF16)
		accumulate_into(sum, OFL_OPTIM_BF16, gradient, gradient_dtype,
				num_elements);
	else if (sum_dtype == OFL_OPTIM_F16)
		accumulate_into(sum, OFL_OPTIM_F16, gradient, gradient_dtype,
				num_elements);
	else
		accumulate_into(sum, OFL_OPTIM_F32, gradient, gradient_dtype,
				num_elements);
}

static OFL_TARGET uint64_t read_words(const uint64_t *words, size_t num_words)
{
	uint64_t sum = 0;

	for (size_t i = 0; i < num_words; i++)
		sum ^= words[i];
	return sum;
}

OFL_INLINE void bare_line(const struct ofl_optim_bare_array *array, char *at, vi key,
			  vi *folded)
{
	vi x = vi_set1(OFL_OPTIM_BARE_BITS);

	if (array->is_read)
		x = vf_as_vi(vf_load((const float *)(void *)at));
	x = vi_add(x, key);
	if (!array->is_written)
		*folded = vi_add(*folded, x);
	else
		store_16(at, x, !array->is_read);
}

static OFL_TARGET void bare(const struct ofl_optim_bare_array *arrays, size_t num_arrays,
			    size_t start, size_t stop, int key)
{
	const vi keys = vi_set1(key);
	vi folded = keys;
	float sink[OFL_WIDTH];

	for (size_t i = start; i < stop; i += OFL_STEP) {
		for (size_t a = 0; a < num_arrays; a++) {
			const size_t itemsize = arrays[a].itemsize;
			char *at = arrays[a].data + i * itemsize;

			for (size_t j = 0; j < OFL_STEP * itemsize; j += sizeof(vi))
				bare_line(&arrays[a], at + j, keys, &folded);
		}
	}
	/* So that no load is left out. */
	vf_store(sink, vi_as_vf(folded));
	__asm__ volatile("" : : "r"(sink) : "memory");
	store_fence();
}

const struct ofl_optim_variant OFL_VARIANT = {
	update_range, masters, norm, nonfinite, accumulate, read_words, bare,
};
