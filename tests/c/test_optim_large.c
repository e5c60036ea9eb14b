// SPDX-License-Identifier: Apache-2.0
// Elements across 2**31 and 2**32 give what the same elements give in small arrays.
#define _GNU_SOURCE
#include "check.h"
#include "pass.h"

#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_ITEMSIZE 4
/* Around a border, in norm blocks that it cuts; slices begin at it. */
#define NUM_BEFORE   ((size_t)5001)
#define NUM_TOUCHED  ((size_t)10004)
#define MAX_BORDER   ((size_t)1 << 32)
#define NUM_RESERVED (MAX_BORDER + NUM_TOUCHED)

#if defined(__SANITIZE_ADDRESS__) || defined(__aarch64__)
#define WALKS_ALL 0
#else
#define WALKS_ALL 1
#endif

/* What an index of 32 bits, with and without a sign, cannot hold. */
static const size_t borders[] = {(size_t)1 << 31, MAX_BORDER};

/* The operands of one pass, and where in them the touched elements begin. */
struct placed {
	void *arrays[NUM_OPERANDS];
	size_t itemsizes[NUM_OPERANDS];
	size_t start;
};

/* Address space only: pages that nobody touches take no memory. */
static char *reserved(size_t num_bytes)
{
	void *memory = mmap(NULL, num_bytes, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (memory == MAP_FAILED)
		exit(SKIPPED);
	return memory;
}

/* Ordinary values that differ from element to element. */
static void fill(char *array, int dtype, size_t start, unsigned seed)
{
	for (size_t i = 0; i < NUM_TOUCHED; i++) {
		const uint16_t half = (uint16_t)(0x3c00 + (i + seed) % 97);
		const float value = 1e-3f * (float)((i + seed) % 64);
		char *at = array + (start + i) * itemsize(dtype);

		if (dtype == OFL_OPTIM_F32)
			memcpy(at, &value, sizeof(value));
		else
			memcpy(at, &half, sizeof(half));
	}
}

static struct placed place(char *const *arrays, struct kind kind, size_t start)
{
	struct placed placed = {.start = start};

	operand_itemsizes(kind, placed.itemsizes);
	for (int i = 0; i < NUM_OPERANDS; i++) {
		if (!placed.itemsizes[i])
			continue;
		placed.arrays[i] = arrays[i];
		memset(arrays[i] + start * placed.itemsizes[i], 0,
		       NUM_TOUCHED * placed.itemsizes[i]);
	}
	fill(placed.arrays[0], kind.parameter_dtype, start, 0);
	fill(placed.arrays[2], kind.gradient_dtype, start, 5);
	return placed;
}

/* A plain step and a measured one, over a range that ends before the border and one
 * across. */
static void step(struct ofl_optim_pool *pool, int variant, const struct placed *placed,
		 struct kind kind, struct ofl_optim_statistics *found)
{
	const size_t start = placed->start, stop = start + NUM_TOUCHED;
	struct ofl_optim_range ranges[] = {{start, start + 700, scalars},
					   {start + 701, stop - 1, scalars}};
	const struct ofl_optim_operands operands =
		operands_over(placed->arrays, kind, start + NUM_TOUCHED);

	ranges[1].scalars.u = -2e-3f;
	CHECK_EQUAL(ofl_optim_update(pool, variant, &operands, ranges, 2, NULL), 0);
	CHECK_EQUAL(ofl_optim_update(pool, variant, &operands, ranges, 2, found), 0);
}

static void check_kind(struct ofl_optim_pool *pool, char *const *large,
		       char *const *small, int variant, struct kind kind, size_t border)
{
	struct ofl_optim_statistics found[2], expected[2];
	struct placed far = place(large, kind, border - NUM_BEFORE);
	struct placed near = place(small, kind, 0);
	char before[MAX_ITEMSIZE];

	/* An element outside the ranges, whose value shows whether it was touched. */
	memcpy(before, far.arrays[0], far.itemsizes[0]);
	step(pool, variant, &far, kind, found);
	step(pool, variant, &near, kind, expected);
	for (int i = 0; i < NUM_OPERANDS; i++) {
		const size_t size = far.itemsizes[i];

		if (size)
			CHECK(!memcmp(far.arrays[i] + far.start * size, near.arrays[i],
				      NUM_TOUCHED * size));
	}
	CHECK(!memcmp(before, far.arrays[0], far.itemsizes[0]));
	CHECK(!memcmp(found, expected, sizeof(found)));
	CHECK(found[1].gradient > 0.0 && found[1].update > 0.0);
	CHECK(found[1].parameter > 0.0);
}

static void check_updates(struct ofl_optim_pool *pool, char *const *large,
			  char *const *small, int variant)
{
	static const int forms[][2] = {
		{OFL_OPTIM_SPLIT, OFL_OPTIM_BF16},
		{OFL_OPTIM_FP32, OFL_OPTIM_BF16},
		{OFL_OPTIM_FP32, OFL_OPTIM_F16},
		{OFL_OPTIM_PARAMETER, OFL_OPTIM_F32},
	};

	for (size_t border = 0; border < 2; border++)
		for (int dtype = 0; dtype <= OFL_OPTIM_F16; dtype++)
			for (int rule = 0; rule < OFL_OPTIM_NUM_RULES; rule++)
				for (size_t form = 0; form < 4; form++) {
					const struct kind kind = {rule, forms[form][0],
								  forms[form][1], dtype};

					check_kind(pool, large, small, variant, kind,
						   borders[border]);
				}
}

/* The best of the variants that run here. */
static int best_variant(void)
{
	int variant = OFL_OPTIM_NUM_VARIANTS - 1;

	while (!ofl_optim_variant_runs(variant, ofl_optim_cpu_features()))
		variant--;
	return variant;
}

/*
 * [Note: helpers walk all] Helpers have no ranges.  All but the elements around 2**31 are
 * zeros, whose huge pages, where there are any, stay in the cache.  What cuts an array
 * into slices knows its item size only: one variant is enough, and for each helper an
 * array of either size.  Not under a sanitizer or an emulator, where that takes a
 * minute; check_updates() has the kernels' own indices there.
 */
static void check_norm(struct ofl_optim_pool *pool, char *large, char *small, int dtype)
{
	const size_t start = borders[0] - OFL_OPTIM_NORM_BLOCK;
	const float scales[2] = {0.5f, 3.0f};
	const struct ofl_optim_gradient far = {large, start + NUM_TOUCHED, dtype};
	const struct ofl_optim_gradient near = {small, NUM_TOUCHED, dtype};
	double found, expected;

	fill(large, dtype, start, 3);
	fill(small, dtype, 0, 3);
	CHECK_EQUAL(
		ofl_optim_sums_of_squares(pool, best_variant(), &far, 1, scales, &found),
		0);
	CHECK_EQUAL(ofl_optim_sums_of_squares(pool, best_variant(), &near, 1, scales,
					      &expected),
		    0);
	CHECK(found == expected && found > 0.0);
}

static void check_nonfinite(struct ofl_optim_pool *pool, char *large, int dtype)
{
	const struct ofl_optim_gradient far = {large, borders[0] + NUM_TOUCHED, dtype};
	const float nan = (float)(0.0 / 0.0);
	const uint16_t half_nan = 0x7fc0; /* one in both formats */
	uint64_t count;

	for (int i = -1; i < 2; i++)
		memcpy(large + (borders[0] + (size_t)i) * itemsize(dtype),
		       dtype == OFL_OPTIM_F32 ? (const void *)&nan : &half_nan,
		       itemsize(dtype));
	CHECK_EQUAL(ofl_optim_count_nonfinite(pool, best_variant(), &far, &count), 0);
	CHECK_EQUAL(count, 3);
}

/* As reserved(), for writing to: the first shared_bytes are one small file again
 * and again. */
static char *repeated(size_t num_bytes, size_t shared_bytes)
{
	const size_t file_bytes = (size_t)1 << 22;
	const int file = memfd_create("repeated", MFD_CLOEXEC);
	char *memory = reserved(num_bytes);

	if (file < 0)
		exit(SKIPPED);
	CHECK_EQUAL(ftruncate(file, (off_t)file_bytes), 0);
	for (size_t at = 0; at + file_bytes <= shared_bytes; at += file_bytes)
		CHECK(mmap(memory + at, file_bytes, PROT_READ | PROT_WRITE,
			   MAP_SHARED | MAP_FIXED, file, 0) != MAP_FAILED);
	close(file);
	return memory;
}

static void check_accumulation(struct ofl_optim_pool *pool, char *large,
			       char *const *small, int into, int dtype)
{
	const size_t start = borders[0] - NUM_BEFORE, size = itemsize(into);
	const size_t num_bytes = (start + NUM_TOUCHED) * size;
	const struct ofl_optim_gradient gradient = {large, start + NUM_TOUCHED, dtype};
	const struct ofl_optim_gradient few = {small[0], NUM_TOUCHED, dtype};
	char *far = repeated(num_bytes, start * size);

	fill(large, dtype, start, 1);
	fill(small[0], dtype, 0, 1);
	fill(far, into, start, 2);
	fill(small[1], into, 0, 2);
	CHECK_EQUAL(ofl_optim_accumulate(pool, best_variant(), far, into, &gradient), 0);
	CHECK_EQUAL(ofl_optim_accumulate(pool, best_variant(), small[1], into, &few), 0);
	CHECK(!memcmp(far + start * size, small[1], NUM_TOUCHED * size));
	CHECK_EQUAL(munmap(far, num_bytes), 0);
}

/* Arrays of zeros, each for one check. */
static void check_gradients(struct ofl_optim_pool *pool, char *const *large,
			    char *const *small)
{
	for (int i = 0; i < NUM_OPERANDS; i++) {
		CHECK_EQUAL(madvise(large[i], NUM_RESERVED * MAX_ITEMSIZE, MADV_DONTNEED),
			    0);
		/* Refused where the kernel has none. */
		(void)madvise(large[i], NUM_RESERVED * MAX_ITEMSIZE, MADV_HUGEPAGE);
	}
	check_accumulation(pool, large[0], small, OFL_OPTIM_F16, OFL_OPTIM_F32);
	check_accumulation(pool, large[1], small, OFL_OPTIM_F32, OFL_OPTIM_BF16);
	check_norm(pool, large[2], small[0], OFL_OPTIM_BF16);
	check_norm(pool, large[3], small[0], OFL_OPTIM_F32);
	check_nonfinite(pool, large[4], OFL_OPTIM_F16);
	CHECK_EQUAL(madvise(large[4], NUM_RESERVED * MAX_ITEMSIZE, MADV_DONTNEED), 0);
	check_nonfinite(pool, large[4], OFL_OPTIM_F32);
}

int main(void)
{
	char *large[NUM_OPERANDS], *small[NUM_OPERANDS];
	struct ofl_optim_pool *pool;

	for (int i = 0; i < NUM_OPERANDS; i++) {
		large[i] = reserved(NUM_RESERVED * MAX_ITEMSIZE);
		small[i] = reserved(NUM_TOUCHED * MAX_ITEMSIZE);
	}
	CHECK_EQUAL(ofl_optim_pool_open(&pool, 2), 0);
	for (int variant = 0; variant < OFL_OPTIM_NUM_VARIANTS; variant++)
		if (ofl_optim_variant_runs(variant, ofl_optim_cpu_features()))
			check_updates(pool, large, small, variant);
	if (WALKS_ALL)
		check_gradients(pool, large, small);
	ofl_optim_pool_close(pool);
	return 0;
}
