/* A digest of the files that a build was made from. */

__attribute__((visibility("default"))) const char *kedge_sources(void) { return KEDGE_SOURCES; }
