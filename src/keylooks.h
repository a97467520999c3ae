/*-------------------------------------------------------------------------
 *
 * keylooks.h
 *	  What a key looks like: guesses for idem_health.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_KEYLOOKS_H
#define IDEM_KEYLOOKS_H

extern bool idem_key_looks_random(const char *key, int len);
extern bool idem_key_looks_like_email(const char *key, int len);

#endif							/* IDEM_KEYLOOKS_H */
