'use strict';

const { createHash } = require('node:crypto');
const { withIdem, shouldRetry } = require('./idem.js');

/* The header's value is a String of RFC 8941: quoted, printable ASCII. */
const STRING = /^"((?:[ !#-[\]-~]|\\["\\])+)"$/;

const KEY = 'SELECT idem_key($1::text, $2::text, $3::text) AS key';

/* What is answered if it could not be done, by SQLSTATE. */
const PROBLEMS = {
  ID001: [422, 'Idempotency-Key was used before with a different request'],
  ID002: [409, 'A request with this Idempotency-Key is being processed'],
  ID003: [409, 'It is not known yet whether this request was done'],
  ID004: [412, 'This request is too old to know whether it was done'],
};

function problem(status, title, headers) {
  const type = 'https://api.shop.example/idempotency'; // where yours is described
  return {
    status,
    headers: { 'Content-Type': 'application/problem+json', ...headers },
    body: JSON.stringify({ type, status, title }),
  };
}

/*
 * Answers a request: runs handler(client, body) once for its tenant, route and
 * Idempotency-Key, in the transaction that stores what it returns (status,
 * headers, body), and returns that to each duplicate.  Whatever it returns is
 * stored, a refusal, too; if it throws, nothing is done and nothing stored.
 */
async function answerOnce(pool, { tenant, route, header, body }, handler) {
  if (header === undefined) return problem(400, 'Idempotency-Key is missing');
  const [, string] = STRING.exec(header) ?? [];
  if (!string) return problem(400, 'Idempotency-Key is not a quoted string');

  try {
    const { rows: [{ key }] } = await pool.query(KEY, [tenant, route, string]).catch(lost);
    const request = createHash('sha256').update(body).digest('hex');
    const { result } = await withIdem(pool, key, request,
      async (client) => pack(await handler(client, body)));
    return unpack(JSON.parse(result));
  } catch (error) {
    const [status, title] = PROBLEMS[error.code] ?? [];
    const again = { 'Retry-After': '1' };
    if (status) return problem(status, title, status === 409 ? again : {});
    if (shouldRetry(error)) return problem(503, 'Nothing is known to be done', again);
    console.error(error);
    return problem(500, 'Nothing was done');
  }
}

/* An error that is not the server's is the connection's: connection_failure. */
function lost(error) {
  error.code ??= '08006';
  throw error;
}

/* JSON that holds any body, and is readable if that is: a character for a byte. */
function pack({ status, headers, body }) {
  return { status, headers, body: Buffer.from(body).toString('latin1') };
}

function unpack({ status, headers, body }) {
  return { status, headers, body: Buffer.from(body, 'latin1') };
}

/* A listener for http.createServer(); routes are { 'POST /invoices': handler }. */
function listener(pool, tenantOf, routes) {
  return async (req, res) => {
    const chunks = [];
    try {
      for await (const chunk of req) chunks.push(chunk);
    } catch {
      return; // the client went away before it had asked
    }
    const route = `${req.method} ${req.url}`;
    const tenant = tenantOf(req);
    let answer;
    if (!tenant) {
      answer = { status: 401, headers: { 'WWW-Authenticate': 'Bearer' }, body: '' };
    } else if (!Object.hasOwn(routes, route)) {
      answer = { status: 404, headers: {}, body: '' };
    } else {
      const header = req.headers['idempotency-key'];
      const body = Buffer.concat(chunks);
      answer = await answerOnce(pool, { tenant, route, header, body }, routes[route]);
    }
    const length = Buffer.byteLength(answer.body);
    res.writeHead(answer.status, { ...answer.headers, 'Content-Length': length });
    res.end(answer.body);
  };
}

module.exports = { answerOnce, listener };
