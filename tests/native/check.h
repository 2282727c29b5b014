// What the tests of the C sources share: each part is a function that main.c calls.
#ifndef PLAIT_CHECK_H
#define PLAIT_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition, ...)                                                                                     \
    do {                                                                                                          \
        if (!(condition)) {                                                                                       \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);                                       \
            fprintf(stderr, __VA_ARGS__);                                                                         \
            fputc('\n', stderr);                                                                                  \
            exit(1);                                                                                              \
        }                                                                                                         \
    } while (0)

void test_kernels(void);
void test_group(void);
void test_helper(void);
void test_messages(void);
void test_processes(void);
void test_sums(void);

#endif
