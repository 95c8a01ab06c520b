/* Whether this processor has AVX2, with which a loop over bytes handles 32 of them at a time.
 *
 * Wheels run on any x86-64 processor, so a module in C has its loop twice: once without AVX2, and
 * once in a function with the attribute WITH_AVX2, which is called only if has_avx2() returned 1.
 * Tests define WITHOUT_AVX2 to try the other loop. */

#ifndef PENSTOCK_AVX2_H
#define PENSTOCK_AVX2_H

#if defined(__x86_64__) && defined(__GNUC__) && !defined(WITHOUT_AVX2)
#include <cpuid.h>
#include <immintrin.h>
#define WITH_AVX2 __attribute__((target("avx2")))

/* __builtin_cpu_supports() is not used, because it needs a symbol that some C runtimes lack. */
static int has_avx2(void) {
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & 6) != 6) return 0; /* the operating system does not save the wide registers */
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}
#endif

#endif
