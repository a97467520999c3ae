/*-------------------------------------------------------------------------
 *
 * keylooks.c
 *	  What a key looks like: guesses for idem_health, nothing depends on them.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "keylooks.h"

static bool
is_hex(char c)
{
	return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') ||
		(c >= 'A' && c <= 'F');
}

static bool
is_alnum(char c)
{
	return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') ||
		(c >= 'A' && c <= 'Z');
}

/*
 * Nothing but a random UUID, or 32 and more hexadecimal digits.
 */
bool
idem_key_looks_random(const char *key, int len)
{
	int			digits = 0;

	for (int i = 0; i < len; i++)
	{
		if (is_hex(key[i]))
			digits++;
		else if (len != 36 || key[i] != '-')
			return false;
	}
	return len == 36 ? digits == 32 && key[14] == '4' : digits >= 32;
}

/*
 * Something@something.something
 */
bool
idem_key_looks_like_email(const char *key, int len)
{
	const char *at = memchr(key, '@', len);
	const char *end = key + len;
	const char *p;

	if (at == NULL || at == key || !is_alnum(at[-1]))
		return false;
	for (p = at + 1; p < end && (is_alnum(*p) || *p == '-'); p++)
		;
	return p > at + 1 && p + 1 < end && *p == '.' &&
		is_alnum(p[1]);
}
