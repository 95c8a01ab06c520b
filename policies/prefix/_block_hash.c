/* Hashes prompt bytes to block keys for block_hash.py, whose Python form explains the steps.
 *
 * The function is pure: it keeps no state, and does no I/O. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#include "policies/avx2.h"

/* Return the sum of a block's folded words, each times its own secret number, modulo 2**64. */
typedef uint64_t sum_function(const char *block, const uint64_t *word_keys, Py_ssize_t count, uint64_t fold);

static uint64_t sum_words(const char *block, const uint64_t *word_keys, Py_ssize_t count, uint64_t fold) {
    uint64_t total = 0;
    for (Py_ssize_t column = 0; column < count; column++) {
        uint64_t word;
        memcpy(&word, block + 8 * column, 8); /* a prompt may begin at any address */
        word *= fold;
        total += (word ^ word >> 32) * word_keys[column];
    }
    return total;
}

#ifdef WITH_AVX2
/* Return the products of four pairs of numbers modulo 2**64; AVX2 multiplies only halves. */
WITH_AVX2 static inline __m256i multiply(__m256i one, __m256i other) {
    __m256i low = _mm256_mul_epu32(one, other);
    __m256i cross = _mm256_add_epi64(
        _mm256_mul_epu32(_mm256_srli_epi64(one, 32), other),
        _mm256_mul_epu32(one, _mm256_srli_epi64(other, 32))
    );
    return _mm256_add_epi64(low, _mm256_slli_epi64(cross, 32));
}

WITH_AVX2 static uint64_t sum_words_avx2(
    const char *block, const uint64_t *word_keys, Py_ssize_t count, uint64_t fold
) {
    __m256i factor = _mm256_set1_epi64x((long long)fold), totals = _mm256_setzero_si256();
    Py_ssize_t column = 0;
    for (; column + 4 <= count; column += 4) {
        __m256i words = _mm256_loadu_si256((const __m256i *)(block + 8 * column));
        words = multiply(words, factor);
        words = _mm256_xor_si256(words, _mm256_srli_epi64(words, 32));
        __m256i keys = _mm256_loadu_si256((const __m256i *)(word_keys + column));
        totals = _mm256_add_epi64(totals, multiply(words, keys));
    }
    uint64_t lanes[4];
    _mm256_storeu_si256((__m256i *)lanes, totals);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3] +
           sum_words(block + 8 * column, word_keys + column, count - column, fold);
}
#endif

static sum_function *sum_of_block = sum_words;

static PyObject *chain_words(PyObject *self, PyObject *args) {
    Py_buffer data, word_keys, position_keys, keys;
    unsigned long long fold, mix, key;
    if (!PyArg_ParseTuple(
            args, "y*y*y*KKKw*", &data, &word_keys, &position_keys, &fold, &mix, &key, &keys
        ))
        return NULL;
    Py_ssize_t words = word_keys.len / 8, blocks = keys.len / 8;
    int fits = position_keys.len / 8 >= blocks && (!words || data.len / (8 * words) >= blocks);
    if (fits) {
        const uint64_t *positions = position_keys.buf;
        uint64_t *results = keys.buf;
        for (Py_ssize_t block = 0; block < blocks; block++) {
            const char *at = (const char *)data.buf + 8 * words * block;
            uint64_t total = sum_of_block(at, word_keys.buf, words, fold) + positions[block];
            key += (total ^ total >> 32) * mix;
            results[block] = key;
        }
    } else PyErr_SetString(PyExc_ValueError, "the prompt or the position keys are too short");
    PyBuffer_Release(&data);
    PyBuffer_Release(&word_keys);
    PyBuffer_Release(&position_keys);
    PyBuffer_Release(&keys);
    return fits ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef functions[] = {
    {"chain_words", chain_words, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_block_hash", NULL, -1, functions, NULL, NULL, NULL, NULL
};

PyMODINIT_FUNC PyInit__block_hash(void) {
#ifdef WITH_AVX2
    if (has_avx2()) sum_of_block = sum_words_avx2;
#endif
    return PyModule_Create(&module);
}
