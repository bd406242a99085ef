/* A library with the interface of AOTInductor's, of one input that it returns. It does what AOTCACHE_TEST_DYING
 * says where it is opened, or where the graph that is named by DYING_GRAPH runs. */
#include <signal.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void die_in(const char *where) {
    const char *wanted = getenv("AOTCACHE_TEST_DYING");
    size_t length = strlen(where);
    if (wanted == NULL || strncmp(wanted, where, length) != 0 || wanted[length] != ':')
        return;
    const char *how = wanted + length + 1;
    if (strcmp(how, "crash") == 0)
        *(volatile int *)0 = 1;
    else if (strcmp(how, "exit") == 0)
        _exit(0);
    else if (strcmp(how, "kill") == 0)
        raise(SIGKILL);
    else if (strcmp(how, "wait") == 0) {
        ssize_t told = write(1, "here\n", 5);
        (void)told;
        for (;;)
            pause();
    }
}

__attribute__((constructor)) static void opened(void) {
    if (strcmp(DYING_GRAPH, "forward") == 0)
        die_in("open");
}

int AOTInductorModelContainerCreateWithDevice(void **handle, size_t models, const char *device, const char *cubins) {
    *handle = (void *)1;
    return 0;
}

int AOTInductorModelContainerDelete(void *handle) { return 0; }

int AOTInductorModelContainerGetNumInputs(void *handle, size_t *number) {
    *number = 1;
    return 0;
}

int AOTInductorModelContainerGetNumOutputs(void *handle, size_t *number) {
    *number = 1;
    return 0;
}

int AOTInductorModelContainerRunSingleThreaded(void *handle, void **inputs, size_t number, void **outputs,
                                               size_t results, void *stream, void *proxy) {
    die_in(DYING_GRAPH);
    outputs[0] = inputs[0];
    return 0;
}
