/*
 * Plays a file of test/clients/contract/ through libpq's pipeline mode.
 *
 *     contract FILE PREFIX PORT LOST-REPLY-PORT LOST-REQUEST-PORT [OPTION]...
 *
 * Nothing is waited for before the end of a transaction, or a step that is to
 * fail, or the next step of another connection.  Options only say which cases
 * are wanted: pipeline, errors-of-sync, pooling=MODE.
 *
 * The last line is "N passed, N failed".
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <libpq-fe.h>

#define INT4OID 23
#define MAX_ARGUMENTS 8
#define MAX_ROWS 16
#define MAX_QUEUE 32
#define MAX_CONNECTIONS 8
#define MAX_NAMES 8
#define PATIENCE 60				/* seconds */

typedef struct Step
{
	int			number;			/* of the line */
	char	   *connection;
	char	   *verb;
	char	   *rest;
	char	   *arguments[MAX_ARGUMENTS];	/* NULL is null */
	char		kinds[MAX_ARGUMENTS];	/* t(ext), i(nt), a(rray) */
	int			narguments;
	char	   *rows[MAX_ROWS];
	int			nrows;			/* -1: not looked at */
	char	   *error;
	char	   *keep;
	bool		lost;
} Step;

typedef struct Connection
{
	char	   *name;
	PGconn	   *conn;
	bool		in_transaction;
	bool		started;		/* its answer is fetched by "finish" */
	Step	   *queue[MAX_QUEUE];	/* sent, and not yet answered */
	int			queued;
} Connection;

static Connection connections[MAX_CONNECTIONS];
static int	nconnections;
static struct
{
	char	   *name;
	char	   *text;
}			names[MAX_NAMES];
static int	nnames;
static char **ports;			/* plain, lost reply, lost request */
static char **options;
static jmp_buf broken;
static char why[2000];

/* The contract is. */
static void __attribute__((noreturn, format(printf, 2, 3)))
fail(const Step *step, const char *format,...)
{
	va_list		args;
	int			len = snprintf(why, sizeof(why), "line %d: ", step->number);

	va_start(args, format);
	vsnprintf(why + len, sizeof(why) - len, format, args);
	va_end(args);
	longjmp(broken, 1);
}

static void *
checked(void *pointer)
{
	if (pointer == NULL)
		abort();
	return pointer;
}

/* A copy of text with the {names} in it replaced.  Never freed: it is little. */
static char *
fill(const char *text)
{
	char	   *out = checked(strdup(text));

	for (int i = 0; i < nnames; i++)
	{
		char	   *at;

		while ((at = strstr(out, names[i].name)) != NULL)
		{
			char	   *longer = checked(malloc(strlen(out) +
												strlen(names[i].text) + 1));

			sprintf(longer, "%.*s%s%s", (int) (at - out), out, names[i].text,
					at + strlen(names[i].name));
			out = longer;
		}
	}
	return out;
}

static void
set_name(const char *name, const char *text)
{
	if (nnames == MAX_NAMES)
		abort();
	names[nnames].name = checked(malloc(strlen(name) + 3));
	sprintf(names[nnames].name, "{%s}", name);
	names[nnames++].text = checked(strdup(text));
}

/* {"one","two",NULL} of one|two|NULL */
static char *
array_literal(const char *items)
{
	char	   *out = checked(calloc(2 * strlen(items) + 1000, 1));
	char	   *copy = checked(strdup(items));
	char	   *end = out;
	char	   *item;

	*end++ = '{';
	while ((item = strsep(&copy, "|")) != NULL)
	{
		if (end != out + 1)
			*end++ = ',';
		if (strcmp(item, "NULL") == 0)
		{
			end = stpcpy(end, item);
			continue;
		}
		*end++ = '"';
		for (; *item != '\0'; item++)
		{
			if (*item == '"' || *item == '\\')
				*end++ = '\\';
			*end++ = *item;
		}
		*end++ = '"';
	}
	*end = '}';
	return out;
}

static Connection *
find_connection(const char *name)
{
	Connection *c;
	const char *port = ports[0];
	const char *words[] = {"host", "port", NULL};
	const char *values[] = {"127.0.0.1", NULL, NULL};

	for (int i = 0; i < nconnections; i++)
		if (strcmp(connections[i].name, name) == 0)
			return &connections[i];

	if (strcmp(name, "lost-reply") == 0)
		port = ports[1];
	else if (strcmp(name, "lost-request") == 0)
		port = ports[2];
	values[1] = port;
	if (nconnections == MAX_CONNECTIONS)
		abort();
	c = &connections[nconnections++];
	memset(c, 0, sizeof(*c));
	c->name = checked(strdup(name));
	c->conn = PQconnectdbParams(words, values, 0);
	if (PQstatus(c->conn) != CONNECTION_OK || PQenterPipelineMode(c->conn) != 1)
	{
		fputs(PQerrorMessage(c->conn), stderr);
		abort();
	}
	return c;
}

static void
enqueue(Connection *c, Step *step, const char *sql)
{
	Oid			types[MAX_ARGUMENTS];
	const char *values[MAX_ARGUMENTS];
	bool		has_arguments = sql == step->rest;
	int			n = has_arguments ? step->narguments : 0;

	for (int i = 0; i < n; i++)
	{
		types[i] = step->kinds[i] == 'i' ? INT4OID : 0;
		values[i] = step->arguments[i];
		if (values[i] != NULL)
			values[i] = fill(values[i]);
		if (step->kinds[i] == 'a')
			values[i] = array_literal(values[i]);
	}
	if (c->queued == MAX_QUEUE)
		abort();
	if (PQsendQueryParams(c->conn, sql, n, types, values, NULL, NULL, 0) != 1 &&
		PQstatus(c->conn) == CONNECTION_OK)
		fail(step, "%s", PQerrorMessage(c->conn));
	c->queue[c->queued++] = step;
}

/* NULL, or what differs from the rows that a step expects */
static const char *
compare_rows(const Step *step, PGresult *result)
{
	static char row[2000];

	for (int i = 0; i < PQntuples(result); i++)
	{
		char	   *end = row;

		row[0] = '\0';
		for (int j = 0; j < PQnfields(result); j++)
			end += snprintf(end, row + sizeof(row) - end, "%s%s",
							j > 0 ? "|" : "",
							PQgetisnull(result, i, j) ? "NULL" :
							PQgetvalue(result, i, j));
		if (i >= step->nrows || strcmp(row, fill(step->rows[i])) != 0)
			return row;
	}
	return PQntuples(result) < step->nrows ? "too few rows" : NULL;
}

/*
 * Send a Sync, unless that was done, and take all answers.  Returns the
 * SQLSTATE of the error, if there was one, "lost" if the connection is, and
 * "rows" if there are others than "retry", a step, expects.
 */
static const char *
settle(Connection *c, const Step *retry)
{
	static char state[6];
	const char *outcome = NULL;
	PGresult   *result;
	int			i = 0;

	if (c->queued == 0)
		return NULL;
	if (!c->started && PQpipelineSync(c->conn) != 1)
		outcome = "lost";
	c->started = false;
	while (outcome == NULL || strcmp(outcome, "lost") != 0)
	{
		Step	   *step = i < c->queued ? c->queue[i] : NULL;
		ExecStatusType status;

		result = PQgetResult(c->conn);
		status = PQresultStatus(result);
		if (result == NULL)
		{
			/* the end of one answer; after the last one the Sync's is next */
			if (PQstatus(c->conn) != CONNECTION_OK)
				outcome = "lost";
			i++;
			continue;
		}
		if (status == PGRES_PIPELINE_SYNC)
		{
			PQclear(result);
			break;
		}
		if (status == PGRES_FATAL_ERROR)
		{
			const char *code = PQresultErrorField(result, PG_DIAG_SQLSTATE);

			if (code == NULL || PQstatus(c->conn) != CONNECTION_OK)
				outcome = "lost";
			else if (outcome == NULL)
			{
				snprintf(state, sizeof(state), "%s", code);
				outcome = state;
			}
		}
		else if (status != PGRES_PIPELINE_ABORTED && step != NULL &&
				 step->error == NULL)
		{
			const char *differs = step->nrows < 0 ? NULL :
				compare_rows(step, result);

			if (differs != NULL && step == retry)
				outcome = "rows";
			else if (differs != NULL)
				fail(step, "%s", differs);
			else if (step->keep != NULL)
				set_name(step->keep, PQgetvalue(result, 0, 0));
		}
		PQclear(result);
	}
	c->queued = 0;
	return outcome;
}

/* Nothing that is still unanswered was to fail. */
static void
settle_quietly(Connection *c, const Step *step)
{
	const char *outcome = c->started ? NULL : settle(c, NULL);

	if (outcome != NULL)
		fail(step, "before it: %s %s", outcome, PQerrorMessage(c->conn));
}

/* What came of a step, against what should have. */
static void
expect(const Connection *c, const Step *step, const char *outcome)
{
	const char *expected = step->lost ? "lost" : step->error;

	if (outcome == NULL && expected == NULL)
		return;
	if (outcome == NULL)
		fail(step, "no error");
	if (expected == NULL || strcmp(outcome, expected) != 0)
		fail(step, "%s %s", outcome, PQerrorMessage(c->conn));
}

static void
until(Connection *c, Step *step)
{
	time_t		end = time(NULL) + PATIENCE;

	while (true)
	{
		const char *outcome;
		struct timespec pause = {0, 20 * 1000 * 1000};

		enqueue(c, step, step->rest);
		outcome = settle(c, step);
		if (outcome == NULL)
			return;
		if (strcmp(outcome, "rows") != 0 || time(NULL) > end)
			fail(step, "%s", outcome);
		nanosleep(&pause, NULL);
	}
}

static void
play(Step *step)
{
	Connection *c = find_connection(step->connection);
	bool		send = strcmp(step->verb, "send") == 0;
	bool		wait = step->error || step->keep || step->lost;
	char		sql[200];

	/* It must see what the others did before. */
	for (int i = 0; i < nconnections; i++)
		if (&connections[i] != c)
			settle_quietly(&connections[i], step);

	snprintf(sql, sizeof(sql), "%s %s", step->verb, step->rest);
	if (strcmp(step->verb, "run") == 0 || send)
	{
		enqueue(c, step, step->rest);
		wait |= !send && !c->in_transaction;
	}
	else if (strcmp(step->verb, "begin") == 0)
	{
		if (*step->rest != '\0')
			snprintf(sql, sizeof(sql), "BEGIN ISOLATION LEVEL %s", step->rest);
		enqueue(c, step, sql);
		c->in_transaction = true;
	}
	else if (strcmp(step->verb, "commit") == 0 || strcmp(sql, "rollback ") == 0)
	{
		enqueue(c, step, sql);
		c->in_transaction = false;
		wait = true;
	}
	else if (strcmp(step->verb, "savepoint") == 0 ||
			 strcmp(step->verb, "rollback") == 0)
		enqueue(c, step, sql);
	else if (strcmp(step->verb, "start") == 0)
	{
		enqueue(c, step, step->rest);
		c->started = true;
		if (PQpipelineSync(c->conn) != 1 || PQflush(c->conn) != 0)
			fail(step, "%s", PQerrorMessage(c->conn));
	}
	else if (strcmp(step->verb, "finish") == 0)
	{
		c->queue[c->queued - 1] = step;
		wait = true;
	}
	else if (strcmp(step->verb, "until") == 0)
		until(c, step);
	else if (strcmp(step->verb, "close") == 0)
	{
		settle_quietly(c, step);
		PQfinish(c->conn);
		*c = connections[--nconnections];
		return;
	}
	else if (strcmp(step->verb, "sync") == 0)
		wait = true;
	else
		fail(step, "what is %s?", step->verb);

	if (wait)
		expect(c, step, settle(c, NULL));
}

static bool
has_option(const char *option)
{
	for (char **o = options; *o != NULL; o++)
		if (strcmp(*o, option) == 0)
			return true;
	return false;
}

static int	passed;
static int	failed;

static void
run_case(const char *prefix, int number, const char *title, Step *steps, int n)
{
	char		key[200];

	nnames = 0;
	snprintf(key, sizeof(key), "%s:%d", prefix, number);
	set_name("key", key);
	if (setjmp(broken) == 0)
	{
		for (int i = 0; i < n; i++)
			play(&steps[i]);
		for (int i = 0; i < nconnections; i++)
			settle_quietly(&connections[i], &steps[n - 1]);
		passed++;
		printf("ok - %s\n", title);
	}
	else
	{
		failed++;
		printf("not ok - %s: %s\n", title, why);
	}
	fflush(stdout);
	for (int i = 0; i < nconnections; i++)
		PQfinish(connections[i].conn);
	nconnections = 0;
}

static void
read_detail(Step *step, const char *word, char *rest)
{
	if (strcmp(word, "row") == 0 || strcmp(word, "no") == 0)
	{
		step->nrows = step->nrows < 0 ? 0 : step->nrows;
		if (*word == 'r')
			step->rows[step->nrows++] = rest;
	}
	else if (strcmp(word, "error") == 0)
		step->error = rest;
	else if (strcmp(word, "keep") == 0)
		step->keep = rest;
	else if (strcmp(word, "lost") == 0)
		step->lost = true;
	else
	{
		step->kinds[step->narguments] = strcmp(word, "arg") == 0 ? 't' : *word;
		step->arguments[step->narguments++] = *word == 'n' ? NULL : rest;
	}
	if (step->nrows == MAX_ROWS || step->narguments == MAX_ARGUMENTS)
		abort();
}

/* Cuts the first word off, and returns what follows the space after it. */
static char *
cut_word(char *text)
{
	char	   *space = strchr(text, ' ');

	if (space == NULL)
		return text + strlen(text);
	*space = '\0';
	return space + 1;
}

int
main(int argc, char **argv)
{
	static Step steps[200];
	FILE	   *file = argc > 5 ? fopen(argv[1], "r") : NULL;
	char	   *line = NULL;
	size_t		size = 0;
	char	   *title = NULL;
	int			nsteps = 0;
	int			number = 0;
	int			ncases = 0;
	bool		wanted = true;
	ssize_t		len;

	if (file == NULL)
	{
		fprintf(stderr, "usage: contract FILE PREFIX PORT PORT PORT [OPTION]...\n");
		return 2;
	}
	ports = argv + 3;
	options = argv + 6;
	while (true)
	{
		char	   *text = NULL;

		len = getline(&line, &size, file);
		number++;
		if (len > 0)
		{
			if (line[len - 1] == '\n')
				line[len - 1] = '\0';
			if (line[0] == '#' || strspn(line, " ") == strlen(line))
				continue;
			text = checked(strdup(line));
		}
		if (text == NULL || strncmp(text, "== ", 3) == 0)
		{
			if (title != NULL && wanted)
				run_case(argv[2], ++ncases, title, steps, nsteps);
			if (text == NULL)
				break;
			title = text + 3;
			nsteps = 0;
			wanted = true;
		}
		else if (text[0] != ' ')
		{
			Step	   *step = &steps[nsteps++];

			memset(step, 0, sizeof(*step));
			step->number = number;
			step->nrows = -1;
			step->connection = text;
			step->verb = cut_word(text);
			step->rest = cut_word(step->verb);
		}
		else
		{
			char	   *word = text + strspn(text, " ");
			char	   *rest = cut_word(word);

			if (nsteps > 0)
				read_detail(&steps[nsteps - 1], word, rest);
			else if (has_option(rest) != (strcmp(word, "only") == 0))
				wanted = false;
		}
	}
	printf("%d passed, %d failed\n", passed, failed);
	return failed > 0 || passed == 0;
}
