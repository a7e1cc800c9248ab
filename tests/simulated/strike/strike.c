// A trace function of Python's that sends this thread a signal: see tests/strikes.py.
//
// It is C, because a trace function in Python would meet the signal itself.

#include <pthread.h>
#include <signal.h>
#include <string.h>

// Of the interpreter that loads this. Its headers are not needed for so little.
extern int PyObject_SetAttrString(void *object, const char *name, void *value);
extern void *PyObject_GetAttrString(void *object, const char *name);
extern const char *PyUnicode_AsUTF8(void *text);
extern void Py_DecRef(void *object);
extern struct _object _Py_TrueStruct;

enum { CALL = 0, OPCODE = 7 };  // PyTrace_CALL, PyTrace_OPCODE

__attribute__((visibility("default"))) long strike_steps, strike_at, strike_entered;

__attribute__((visibility("default"))) const char *strike_folder;

static int is_struck(void *frame) {  // the names are the code's, which the frame keeps
    void *code = PyObject_GetAttrString(frame, "f_code"), *file = PyObject_GetAttrString(code, "co_filename");
    int within = !strncmp(PyUnicode_AsUTF8(file), strike_folder, strlen(strike_folder));
    Py_DecRef(file);
    Py_DecRef(code);
    return within;
}

__attribute__((visibility("default"))) int strike_trace(void *object, void *frame, int what, void *argument) {
    (void)object, (void)argument;
    if (what == CALL) {
        strike_entered = strike_steps;
        if (!is_struck(frame))
            return 0;
        // 3.13 looks whether a frame has a function of its own, whatever that is.
        return PyObject_SetAttrString(frame, "f_trace", &_Py_TrueStruct) ||
               PyObject_SetAttrString(frame, "f_trace_opcodes", &_Py_TrueStruct) ? -1 : 0;
    }
    if (what == OPCODE && ++strike_steps == strike_at)
        pthread_kill(pthread_self(), SIGUSR1);
    return 0;
}
