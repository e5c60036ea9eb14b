// SPDX-License-Identifier: Apache-2.0
// Which instruction sets the CPU and the operating system support.
#include "internal.h"

#include <errno.h>
#include <stdatomic.h>

#if OFL_OPTIM_HAS_X86
#include <cpuid.h>

/* XCR0 bits, Intel SDM volume 1, 13.3: registers that the system saves. */
#define XCR0_YMM 0x06u /* SSE, AVX */
#define XCR0_ZMM 0xe6u /* and opmask, upper halves of ZMM, upper ZMM */

static uint64_t read_xcr0(void)
{
	uint32_t low, high;

	__asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
	return (uint64_t)high << 32 | low;
}

static unsigned probe(void)
{
	unsigned eax, ebx, ecx, edx, features = 0;
	unsigned has_f16c;
	uint64_t xcr0;

	if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & bit_OSXSAVE))
		return 0;
	has_f16c = ecx & bit_F16C;
	xcr0 = read_xcr0();
	if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx))
		return 0;
	if ((xcr0 & XCR0_YMM) == XCR0_YMM && (ebx & bit_AVX2) && has_f16c)
		features |= OFL_OPTIM_FEATURE_AVX2;
	if ((xcr0 & XCR0_ZMM) == XCR0_ZMM && (ebx & bit_AVX512F) &&
	    (ebx & bit_AVX512BW) && has_f16c)
		features |= OFL_OPTIM_FEATURE_AVX512;
	return features;
}
#elif OFL_OPTIM_HAS_NEON
/* Part of every 64-bit ARM core that runs a general operating system. */
static unsigned probe(void)
{
	return OFL_OPTIM_FEATURE_NEON;
}
#else
static unsigned probe(void)
{
	return 0;
}
#endif

/* CPUID is slow in a virtual machine, so it is asked once. */
unsigned ofl_optim_cpu_features(void)
{
	const unsigned is_known = 1u << 31;
	static _Atomic unsigned known;
	unsigned features = atomic_load_explicit(&known, memory_order_relaxed);

	/* Relaxed: the word is all there is; two first callers find the same. */
	if (!features) {
		features = probe() | is_known;
		atomic_store_explicit(&known, features, memory_order_relaxed);
	}
	return features & ~is_known;
}

static unsigned feature_of(const char *name, size_t length)
{
	if (length == 4 && memcmp(name, "avx2", 4) == 0)
		return OFL_OPTIM_FEATURE_AVX2;
	if (length == 6 && memcmp(name, "avx512", 6) == 0)
		return OFL_OPTIM_FEATURE_AVX512;
	if (length == 4 && memcmp(name, "neon", 4) == 0)
		return OFL_OPTIM_FEATURE_NEON;
	return 0;
}

int ofl_optim_parse_features(const char *names)
{
	unsigned mask = 0;

	if (!names)
		return -EINVAL;
	for (;;) {
		size_t length;
		unsigned feature;

		names += strspn(names, ", ");
		if (!*names)
			return (int)mask;
		length = strcspn(names, ", ");
		feature = feature_of(names, length);
		if (!feature)
			return -EINVAL;
		mask |= feature;
		names += length;
	}
}

int ofl_optim_variant_runs(int variant, unsigned features)
{
	const unsigned both = OFL_OPTIM_FEATURE_AVX2 | OFL_OPTIM_FEATURE_AVX512;

	switch (variant) {
	case OFL_OPTIM_SCALAR:
		return 1;
	case OFL_OPTIM_AVX2:
		return (features & OFL_OPTIM_FEATURE_AVX2) != 0;
	case OFL_OPTIM_AVX512:
		return (features & both) == both;
	case OFL_OPTIM_NEON:
		return (features & OFL_OPTIM_FEATURE_NEON) != 0;
	default:
		return 0;
	}
}

const char *ofl_optim_variant_name(int variant)
{
	static const char *const names[OFL_OPTIM_NUM_VARIANTS] = {"scalar", "avx2",
								  "avx512", "neon"};

	if (variant < 0 || variant >= OFL_OPTIM_NUM_VARIANTS)
		return NULL;
	return names[variant];
}
