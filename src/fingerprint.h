/*-------------------------------------------------------------------------
 *
 * fingerprint.h
 *	  Fingerprints of requests, and the digests they share with keys.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_FINGERPRINT_H
#define IDEM_FINGERPRINT_H

#include "common/cryptohash.h"
#include "utils/jsonb.h"
#include "utils/uuid.h"

/* The algorithm that new fingerprints are made with; their first byte */
#define IDEM_FINGERPRINT_VERSION 1

extern void idem_fingerprint_compute(Jsonb *request, pg_uuid_t *result);
extern bool idem_fingerprint_matches(const pg_uuid_t *stored, Jsonb *request);

/* What key.c needs as well */
extern const char *idem_to_utf8(const char *str, int *len);
extern void idem_digest(pg_cryptohash_type type, const void *data, size_t len,
						uint8 *digest, size_t digest_len);

#endif							/* IDEM_FINGERPRINT_H */
