/* Ends a use of vec.h, so that it can be included for the next instruction set. */
#undef FN_CAT2
#undef FN_CAT
#undef FN
#undef vf
#undef vi
#undef vu
#undef vf_mem
#undef vh
#undef vh_mem
#undef VW
#undef SUFFIX
