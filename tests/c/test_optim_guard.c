// SPDX-License-Identifier: Apache-2.0
// No kernel touches a byte outside its operands; vector variants equal the scalar one.
#define _GNU_SOURCE
#include "check.h"
#include "pass.h"

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_ELEMENTS 129

/* One page between two that may not be touched. */
struct guarded {
	unsigned char *page;
	size_t page_bytes;
};

/* The operands of one pass, each at the start or at the end of its page. */
struct placed {
	void *arrays[NUM_OPERANDS];
	size_t bytes[NUM_OPERANDS];
	struct ofl_optim_operands operands;
};

static struct guarded guarded_page(void)
{
	const size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
	unsigned char *memory =
		mmap(NULL, 3 * page_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(memory != MAP_FAILED);
	CHECK_EQUAL(mprotect(memory + page_bytes, page_bytes, PROT_READ | PROT_WRITE), 0);
	return (struct guarded){memory + page_bytes, page_bytes};
}

/* Values that differ from element to element and are ordinary in every format. */
static void fill(unsigned char *bytes, size_t num_bytes, unsigned seed)
{
	for (size_t i = 0; i < num_bytes; i++)
		bytes[i] = (unsigned char)(i % 2 ? 0x3c : (i * 37 + seed) % 251);
}

static struct placed place(struct guarded *pages, struct kind kind, size_t n,
			   int is_at_end)
{
	struct placed placed;
	size_t sizes[NUM_OPERANDS];

	operand_itemsizes(kind, sizes);
	for (int i = 0; i < NUM_OPERANDS; i++) {
		unsigned char *at = pages[i].page;

		placed.bytes[i] = sizes[i] * n;
		if (is_at_end)
			at += pages[i].page_bytes - placed.bytes[i];
		fill(at, placed.bytes[i], (unsigned)i);
		placed.arrays[i] = sizes[i] ? at : NULL;
	}
	placed.operands = operands_over(placed.arrays, kind, n);
	return placed;
}

static void check_update(struct ofl_optim_pool *pool, struct guarded *pages,
			 struct guarded *others, int variant, struct kind kind)
{
	for (size_t n = 0; n <= MAX_ELEMENTS; n++) {
		for (int is_at_end = 0; is_at_end < 2; is_at_end++) {
			struct placed a = place(pages, kind, n, is_at_end);
			struct placed b = place(others, kind, n, is_at_end);
			const struct ofl_optim_range range = {0, n, scalars};
			struct ofl_optim_statistics found;
			/* Both ways of going through the elements. */
			struct ofl_optim_statistics *statistics = n % 2 ? &found : NULL;

			CHECK_EQUAL(ofl_optim_update(pool, variant, &a.operands, &range,
						     1, statistics),
				    0);
			CHECK_EQUAL(ofl_optim_update(pool, OFL_OPTIM_SCALAR, &b.operands,
						     &range, 1, NULL),
				    0);
			for (int i = 0; i < NUM_OPERANDS; i++)
				CHECK(!a.bytes[i] ||
				      !memcmp(a.arrays[i], b.arrays[i], a.bytes[i]));
		}
	}
}

static void check_gradients(struct ofl_optim_pool *pool, struct guarded *pages,
			    struct guarded *others, int variant, int dtype)
{
	const float scales[2] = {0.5f, 3.0f};

	for (size_t n = 0; n <= MAX_ELEMENTS; n++) {
		const size_t num_bytes = n * itemsize(dtype);
		unsigned char *at = pages[0].page + pages[0].page_bytes - num_bytes;
		const struct ofl_optim_gradient gradient = {at, n, dtype};
		double sum = -1.0, expected = -2.0;
		uint64_t count = 9;

		fill(at, num_bytes, 1);
		CHECK_EQUAL(ofl_optim_sums_of_squares(pool, variant, &gradient, 1, scales,
						      &sum),
			    0);
		CHECK_EQUAL(ofl_optim_sums_of_squares(pool, OFL_OPTIM_SCALAR, &gradient,
						      1, scales, &expected),
			    0);
		CHECK(memcmp(&sum, &expected, sizeof(sum)) == 0);
		CHECK_EQUAL(ofl_optim_count_nonfinite(pool, variant, &gradient, &count),
			    0);
		CHECK_EQUAL(count, 0);
		for (int into = 0; into <= OFL_OPTIM_F16; into++) {
			const size_t sum_bytes = n * itemsize(into);
			unsigned char *a =
				pages[1].page + pages[1].page_bytes - sum_bytes;
			unsigned char *b = others[1].page;

			fill(a, sum_bytes, 2);
			fill(b, sum_bytes, 2);
			CHECK_EQUAL(
				ofl_optim_accumulate(pool, variant, a, into, &gradient),
				0);
			CHECK_EQUAL(ofl_optim_accumulate(pool, OFL_OPTIM_SCALAR, b, into,
							 &gradient),
				    0);
			CHECK(memcmp(a, b, sum_bytes) == 0);
		}
	}
}

/* Whole steps of 64 are rewritten as they are; of codec fp32 the parameter
 * becomes 1 in bf16: zeros would be written faster than what an update writes. */
static void check_bare_pass(struct ofl_optim_pool *pool, struct guarded *pages,
			    struct guarded *others, int variant, struct kind kind)
{
	const size_t n = 128;
	struct placed a = place(pages, kind, n, 1), b = place(others, kind, n, 1);

	if (kind.codec == OFL_OPTIM_FP32)
		for (size_t i = 0; i < n; i++)
			((uint16_t *)b.arrays[0])[i] = 0x3f80;
	CHECK_EQUAL(ofl_optim_bare_pass(pool, variant, &a.operands), 0);
	for (int i = 0; i < NUM_OPERANDS; i++)
		CHECK(!a.bytes[i] || !memcmp(a.arrays[i], b.arrays[i], a.bytes[i]));
	a.operands.num_elements = 127; /* the last 63 are left out */
	fill(a.arrays[0], a.bytes[0], 7);
	CHECK_EQUAL(ofl_optim_bare_pass(pool, variant, &a.operands), 0);
	fill(b.arrays[0], b.bytes[0], 7);
	CHECK(memcmp((char *)a.arrays[0] + a.bytes[0] / 2,
		     (char *)b.arrays[0] + b.bytes[0] / 2, a.bytes[0] / 2) == 0);
	a.operands.num_elements = 64;
	a.operands.gradient = (char *)a.arrays[2] + itemsize(kind.gradient_dtype);
	CHECK_EQUAL(ofl_optim_bare_pass(pool, variant, &a.operands), -EINVAL);
}

static void check_variant(struct ofl_optim_pool *pool, struct guarded *pages,
			  struct guarded *others, int variant)
{
	static const int forms[][2] = {
		{OFL_OPTIM_SPLIT, OFL_OPTIM_BF16},
		{OFL_OPTIM_FP32, OFL_OPTIM_BF16},
		{OFL_OPTIM_FP32, OFL_OPTIM_F16},
		{OFL_OPTIM_PARAMETER, OFL_OPTIM_F32},
	};

	for (int dtype = 0; dtype <= OFL_OPTIM_F16; dtype++) {
		for (int rule = 0; rule < OFL_OPTIM_NUM_RULES; rule++)
			for (size_t form = 0; form < 4; form++) {
				const struct kind kind = {rule, forms[form][0],
							  forms[form][1], dtype};

				check_update(pool, pages, others, variant, kind);
				check_bare_pass(pool, pages, others, variant, kind);
			}
		check_gradients(pool, pages, others, variant, dtype);
	}
}

/* Copies end at their last byte, whatever is left over after whole vectors. */
static void check_copy(struct ofl_optim_pool *pool, struct guarded *pages)
{
	for (size_t n = 0; n <= 200; n++) {
		unsigned char *from = pages[0].page + pages[0].page_bytes - n;

		fill(from, n, 5);
		memset(pages[1].page, 0, n + 1);
		for (int is_nontemporal = 0; is_nontemporal < 2; is_nontemporal++) {
			CHECK_EQUAL(ofl_optim_copy(pool, pages[1].page, from, n,
						   is_nontemporal),
				    0);
			CHECK(memcmp(pages[1].page, from, n) == 0);
			CHECK_EQUAL(pages[1].page[n], 0);
		}
	}
}

static int try_update(struct ofl_optim_pool *pool, int variant,
		      const struct ofl_optim_operands *operands,
		      const struct ofl_optim_range *range)
{
	return ofl_optim_update(pool, variant, operands, range, 1, NULL);
}

static void check_refusals(struct ofl_optim_pool *pool, struct guarded *pages)
{
	const struct kind kind = {OFL_OPTIM_ADAMW, OFL_OPTIM_SPLIT, OFL_OPTIM_BF16,
				  OFL_OPTIM_BF16};
	struct placed a = place(pages, kind, 8, 0);
	struct ofl_optim_range range = {.start = 0, .stop = 9};
	struct ofl_optim_pool *none = NULL;

	CHECK_EQUAL(try_update(pool, OFL_OPTIM_SCALAR, &a.operands, &range), -EINVAL);
	range.stop = 8;
	CHECK_EQUAL(try_update(NULL, OFL_OPTIM_SCALAR, &a.operands, &range), -EINVAL);
	CHECK_EQUAL(try_update(pool, OFL_OPTIM_NUM_VARIANTS, &a.operands, &range),
		    -EINVAL);
	a.operands.first = (float *)(void *)(pages[3].page + 2);
	CHECK_EQUAL(try_update(pool, OFL_OPTIM_SCALAR, &a.operands, &range), -EINVAL);
	a.operands.first = NULL;
	CHECK_EQUAL(try_update(pool, OFL_OPTIM_SCALAR, &a.operands, &range), -EINVAL);
	a = place(pages, kind, 8, 0);
	a.operands.parameter_dtype = OFL_OPTIM_F16;
	CHECK_EQUAL(try_update(pool, OFL_OPTIM_SCALAR, &a.operands, &range), -EINVAL);
	a = place(pages, kind, 8, 0);
	a.operands.rule = OFL_OPTIM_NUM_RULES;
	CHECK_EQUAL(try_update(pool, OFL_OPTIM_SCALAR, &a.operands, &range), -EINVAL);
	CHECK_EQUAL(ofl_optim_pool_open(&none, 0), -EINVAL);
	CHECK_EQUAL(ofl_optim_parse_features("avx512, avx2,"), 3);
	CHECK_EQUAL(ofl_optim_parse_features("neon"), 4);
	CHECK_EQUAL(ofl_optim_parse_features(""), 0);
	CHECK_EQUAL(ofl_optim_parse_features("avx"), -EINVAL);
	CHECK_EQUAL(ofl_optim_parse_features("avx512f"), -EINVAL);
	ofl_optim_pool_close(NULL);
}

int main(void)
{
	struct guarded pages[NUM_OPERANDS], others[NUM_OPERANDS];
	struct ofl_optim_pool *pool;

	for (int i = 0; i < NUM_OPERANDS; i++) {
		pages[i] = guarded_page();
		others[i] = guarded_page();
	}
	CHECK_EQUAL(ofl_optim_pool_open(&pool, 2), 0);
	for (int variant = 0; variant < OFL_OPTIM_NUM_VARIANTS; variant++) {
		if (ofl_optim_variant_runs(variant, ofl_optim_cpu_features()))
			check_variant(pool, pages, others, variant);
		else
			printf("%s: does not run here\n",
			       ofl_optim_variant_name(variant));
	}
	check_copy(pool, pages);
	check_refusals(pool, pages);
	ofl_optim_pool_close(pool);
	return 0;
}
