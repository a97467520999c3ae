'use strict';

/*
 * An HTTP service built with http.js, as its clients see it.
 *
 * First what the draft of the Idempotency-Key header asks for, over a plain
 * socket, so that answers can be compared byte for byte.  Then a storm: clients
 * send orders, many of them several at once, to processes that are killed with
 * SIGKILL at every moment of a request, and send them again, with the same key,
 * until they have an answer.  Then the database is compared with what it ought
 * to be.
 *
 * Needs a server with idem installed (the PG* variables say which) and the
 * right to create a database there, which is dropped at the end.
 * The last line is "N passed, N failed".
 */

const { fork } = require('node:child_process');
const { once } = require('node:events');
const net = require('node:net');
const path = require('node:path');
const { setTimeout: pause } = require('node:timers/promises');
const { Client } = require('pg');

const MOMENTS = ['before the claim', 'claimed', 'handled', 'completed', 'committing',
  'committed', 'answering'];
const PROCESSES = 3;
const CLIENTS = 12;
const ORDERS = 300;
const DEATHS = 5; // at each moment, and as many by the hand of others

const result = { passed: 0, failed: 0 };

function check(what, ok, detail = '') {
  result[ok ? 'passed' : 'failed'] += 1;
  console.log(`${ok ? 'ok    ' : 'FAILED'} ${what}${detail && ` (${detail})`}`);
}

/* Checks that all of a list are as they should be; shows the first that is not. */
function checkAll(what, list, isOk) {
  const bad = list.filter((item) => !isOk(item));
  check(what, list.length > 0 && bad.length === 0, bad.length
    ? `not ${bad.length}, first: ${JSON.stringify(bad[0]).slice(0, 300)}` : `all ${list.length}`);
}

class NoAnswer extends Error {}

/*
 * Sends a request on a connection of its own and returns the answer's bytes,
 * its status, and its headers.  The Date, which is the message's and not the
 * answer's, is left out.
 */
async function send(port, { method = 'POST', url = '/orders', tenant = 'ada', header, body = '' }) {
  const socket = net.connect(port, '127.0.0.1');
  const chunks = [];
  const headers = [`Content-Length: ${Buffer.byteLength(body)}`, 'Connection: close',
    ...(tenant ? [`Authorization: Bearer ${tenant}`] : []),
    ...[header ?? []].flat().map((value) => `Idempotency-Key: ${value}`)];
  try {
    socket.write(`${method} ${url} HTTP/1.1\r\nHost: shop\r\n${headers.join('\r\n')}\r\n\r\n`);
    socket.write(body);
    for await (const chunk of socket) chunks.push(chunk);
  } catch (error) {
    throw new NoAnswer(error.code);
  }
  const bytes = Buffer.concat(chunks);
  const end = bytes.indexOf('\r\n\r\n');
  const head = bytes.subarray(0, Math.max(end, 0)).toString('latin1').replace(/\r\nDate: [^\r]*/, '');
  const length = Number(/^Content-Length: (\d+)$/mi.exec(head)?.[1] ?? NaN);
  const content = bytes.subarray(end + 4);
  if (end < 0 || content.length !== length) throw new NoAnswer('cut off');
  return {
    status: Number(head.split(' ')[1]),
    head,
    content,
    bytes: `${head}\r\n\r\n${content.toString('latin1')}`,
    get: (name) => new RegExp(`^${name}: (.*)$`, 'mi').exec(head)?.[1],
  };
}

/* A process of the service, which may have a moment to die at. */
async function startService(moment, requests) {
  const child = fork(path.join(__dirname, 'http-service.js'), moment ? [moment, requests] : [],
    { stdio: ['ignore', 'pipe', 'pipe', 'ipc'] });
  const service = { child, moment, inFlight: 0, alive: true };
  service.gone = once(child, 'close').then(() => { service.alive = false; });
  child.stderr.on('data', (data) => {
    if (!String(data).includes('as it is to')) process.stderr.write(data);
  });
  const [port] = await Promise.race([once(child.stdout, 'data'), service.gone.then(() => [0])]);
  service.port = Number(port);
  return service;
}

async function stopService(service) {
  service.child.kill('SIGKILL');
  await service.gone;
}

const effects = async (db, job) => Number((await db.query(
  'SELECT count(*) AS n FROM effect WHERE job = $1', [job])).rows[0].n);

/* What the draft asks for. */
async function verifyRules(db) {
  const service = await startService();
  const post = (request) => send(service.port, request);
  const one = JSON.stringify({ job: 'one', amount: 1 });
  const key = '"8e03978e-40d5-43dd-bc93-6894a57f9324"';

  const missing = await post({ body: one });
  check('no header is 400', missing.status === 400);
  check('a problem has its media type, a link and a title',
    missing.get('Content-Type') === 'application/problem+json'
    && JSON.parse(missing.content).type.startsWith('https://')
    && JSON.parse(missing.content).title === 'Idempotency-Key is missing');
  const malformed = ['unquoted', '""', '"', '"a', 'a"', '"a"b"', '"a\\b"', '"a\\"', '"\u00e9"',
    '"a\tb"', '"a";', ':YQ==:', '1', '?1', '("a")', ''];
  for (const header of malformed) {
    const { status } = await post({ header, body: one });
    check(`malformed is 400: ${header}`, status === 400, String(status));
  }
  check('two headers are 400', (await post({ header: ['"a"', '"b"'], body: one })).status === 400);
  check('whoever is unknown is 401', (await post({ tenant: '', header: key, body: one })).status === 401);
  check('none of these had an effect', await effects(db, 'one') === 0);

  const first = await post({ header: key, body: one });
  check('the first request is done', first.status === 201 && await effects(db, 'one') === 1);
  const again = await post({ header: key, body: one });
  check('its duplicate gets the same bytes', again.bytes === first.bytes, JSON.stringify(again.bytes));
  check('and no effect', await effects(db, 'one') === 1);
  const other = await post({ header: key, body: JSON.stringify({ job: 'one', amount: 2 }) });
  check('another request with its key is 422', other.status === 422
    && other.get('Content-Type') === 'application/problem+json');
  const bob = await post({ tenant: 'bob', header: key, body: one });
  check('the key of another tenant is another key', bob.status === 201 && bob.bytes !== first.bytes);
  const put = await post({ method: 'PUT', header: key, body: one });
  check('and so is that of another route', put.status === 201 && put.bytes !== first.bytes);
  check('each with its effect', await effects(db, 'one') === 3);
  for (const header of ['"a\\"b\\\\c"', `"${'k'.repeat(2000)}"`, '" a:b%"']) {
    const [a, b] = [await post({ header, body: one }), await post({ header, body: one })];
    check(`a key is ${header.slice(0, 20)}`, a.status === 201 && a.bytes === b.bytes);
  }

  const strange = [await post({ url: '/strange', header: key }), await post({ url: '/strange', header: key })];
  const all = Buffer.from(Array.from({ length: 512 }, (_, i) => i % 256));
  check('any status, headers and bytes are replayed', strange[0].status === 402
    && strange[0].content.equals(all) && strange[0].bytes === strange[1].bytes
    && strange[0].head.includes('X-lower-UPPER: a "b" \\c\r\n')
    && strange[0].head.includes('Set-Cookie: a=1\r\nSet-Cookie: b=2\r\n'));
  check('also of a refusal, which is not repeated', await effects(db, 'strange') === 1);

  const failed = await post({ url: '/failing', header: key });
  check('a handler that throws is 500', failed.status === 500 && await effects(db, 'failing') === 0);
  await db.query('INSERT INTO flag VALUES (1)');
  const later = await post({ url: '/failing', header: key });
  check('and is run again', later.status === 200 && await effects(db, 'failing') === 1);

  await db.query('SELECT pg_advisory_lock(1)');
  const slow = post({ url: '/slow', header: key });
  slow.catch(() => {});
  await db.query(`DO $$ BEGIN
    WHILE NOT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = 1 AND NOT granted) LOOP
      PERFORM pg_sleep(0.01);
    END LOOP; END $$`);
  const early = await post({ url: '/slow', header: key });
  check('a duplicate of a request in flight is 409, with Retry-After', early.status === 409
    && Number(early.get('Retry-After')) > 0 && early.get('Content-Type') === 'application/problem+json');
  const differs = await post({ url: '/slow', header: key, body: 'other' });
  check('and so is another request with its key, for now', differs.status === 409);
  await db.query('SELECT pg_advisory_unlock(1)');
  const done = await slow;
  const retried = await post({ url: '/slow', header: key });
  check('once it is done, the retry gets its answer', done.status === 200 && retried.bytes === done.bytes
    && await effects(db, 'slow') === 1);

  await stopService(service);
}

/* The living processes: each that dies has a successor, which waits already. */
class Services {
  list = [];
  deaths = Object.fromEntries([...MOMENTS, 'in flight'].map((moment) => [moment, 0]));
  planned = Array.from({ length: DEATHS }, () => MOMENTS).flat();

  async start() {
    this.keepers = Array.from({ length: PROCESSES }, (_, i) => this.keep(i));
    while (this.list.filter(Boolean).length < PROCESSES) await pause(10);
  }

  async keep(i) {
    const successor = () => startService(this.planned.shift(), 1 + Math.floor(Math.random() * 8));
    let next = successor();
    while (!this.ended) {
      const service = await next;
      next = successor();
      this.list[i] = service;
      await service.gone;
      if (!this.ended) this.deaths[service.killed ? 'in flight' : service.moment] += 1;
    }
    await stopService(await next);
  }

  async pick() {
    for (;;) {
      const service = this.list[Math.floor(Math.random() * PROCESSES)];
      if (service.alive) return service;
      await pause(5);
    }
  }

  /* Somebody else's kill -9, while it works on a request. */
  async killOne() {
    let service;
    while (!(service = await this.pick()).inFlight) await pause(1);
    service.killed = true;
    service.child.kill('SIGKILL');
    if (service.moment) this.planned.push(service.moment);
  }

  async end() {
    this.ended = true;
    this.list.forEach((service) => service.child.kill('SIGKILL'));
    await Promise.all(this.keepers);
  }
}

/* Sends an order until it is answered; a client that is in a hurry. */
async function place(services, order, count) {
  for (;;) {
    const service = await services.pick();
    count.requests += 1;
    if (order.inFlight) count.together += 1;
    order.inFlight += 1;
    service.inFlight += 1;
    try {
      const answer = await send(service.port, order);
      count[answer.status] = (count[answer.status] ?? 0) + 1;
      if (![409, 503].includes(answer.status)) {
        order.answers.push(answer);
        return;
      }
    } catch (error) {
      if (!(error instanceof NoAnswer)) throw error;
      count.unanswered += 1;
    } finally {
      order.inFlight -= 1;
      service.inFlight -= 1;
    }
    await pause(Math.random() * 20);
  }
}

async function verifyStorm(db) {
  const orders = Array.from({ length: ORDERS }, (_, i) => ({
    header: `"order-${i}"`,
    tenant: i % 2 ? 'ada' : 'bob',
    body: JSON.stringify({ job: `order ${i}`, amount: i }),
    answers: [],
    inFlight: 0,
  }));
  const count = { requests: 0, together: 0, unanswered: 0, 409: 0, 503: 0 };
  const services = new Services();
  await db.query('UPDATE total SET amount = 0');
  await services.start();
  try {
    // one to three clients place an order: some at once, some later
    const queue = orders.flatMap((order, i) => Array.from({ length: 1 + (i % 3) },
      () => ({ order, place: i + (i % 2 ? 0 : Math.random() * 100) })))
      .sort((a, b) => a.place - b.place);
    let placed = 0;
    await Promise.all(Array.from({ length: CLIENTS }, async () => {
      for (let next; (next = queue.shift());) {
        if (++placed % (2 * ORDERS / DEATHS) === 0) await services.killOne();
        await place(services, next.order, count);
      }
    }));
  } finally {
    await services.end();
  }

  const { rows } = await db.query("SELECT job, array_agg(id) AS ids FROM effect WHERE job LIKE 'order %' GROUP BY job");
  const ids = new Map(rows.map((row) => [row.job, row.ids]));
  const { rows: [{ amount }] } = await db.query('SELECT amount::int FROM total');
  const job = (order) => JSON.parse(order.body).job;
  checkAll('each order has its effect once', orders, (order) => ids.get(job(order))?.length === 1);
  check('and nothing else has one', ids.size === ORDERS, String(ids.size));
  check('the total counts each order once', amount === ORDERS * (ORDERS - 1) / 2, String(amount));
  checkAll('each client was answered 201', orders,
    (order) => order.answers.length > 0 && order.answers.every(({ status }) => status === 201));
  checkAll('all who placed an order got the same bytes', orders.filter((order) => order.answers.length > 1),
    (order) => order.answers.every(({ bytes }) => bytes === order.answers[0].bytes));
  checkAll('and they are those of its effect', orders,
    (order) => JSON.parse(order.answers[0].content).id === ids.get(job(order))[0]);
  for (const [moment, deaths] of Object.entries(services.deaths)) {
    check(`processes were killed: ${moment}`, deaths > 0, String(deaths));
  }
  check('requests were sent while another was in flight', count.together > 0, String(count.together));
  check('requests were left unanswered', count.unanswered > 0, String(count.unanswered));
  console.log(`\norders ${ORDERS}, requests ${count.requests}, answered 201: ${count[201]}, 409: ${count[409]}, `
    + `503: ${count[503]}, not at all: ${count.unanswered}\n`);
}

async function main() {
  const database = `idem_http_${process.pid}`;
  const server = new Client();
  await server.connect();
  await server.query(`CREATE DATABASE ${database}`);
  process.env.PGDATABASE = database;
  const db = new Client();
  try {
    await db.connect();
    await db.query(`CREATE EXTENSION idem;
      CREATE TABLE effect (id int GENERATED ALWAYS AS IDENTITY, job text);
      CREATE TABLE total (amount bigint); INSERT INTO total VALUES (0);
      CREATE TABLE flag (up int)`);
    await verifyRules(db);
    await verifyStorm(db);
  } finally {
    await db.end();
    await server.query(`DROP DATABASE ${database} WITH (FORCE)`);
    await server.end();
  }
}

main().catch((error) => {
  check('the test runs to its end', false, error.stack);
}).finally(() => {
  console.log(`${result.passed} passed, ${result.failed} failed`);
  process.exit(result.failed || !result.passed ? 1 : 0);
});
