// Build the extension into dist/ and record a hash of its sources in dist/package.json.
// Needs node_modules (npm ci, also in builder/) and a python3 that has jupyterlab, for the versions of shared packages.
import { execFileSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { existsSync, mkdirSync, readdirSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { dirname, join, relative, resolve } from 'node:path';
import { fileURLToPath } from 'node:url';

const here = resolve(dirname(fileURLToPath(import.meta.url)), '..');
const target = resolve(here, 'dist');
const run = (program, ...args) => execFileSync(program, args, { cwd: here, stdio: ['ignore', 'pipe', 'inherit'], encoding: 'utf8' });

function* filesOf(path) {
  if (!statSync(path).isDirectory()) {
    yield path;
    return;
  }
  for (const name of readdirSync(path).sort()) {
    yield* filesOf(join(path, name));
  }
}

/** Hash the sources; tests/lab/test_built.py does the same. */
function hashSources() {
  const hash = createHash('sha256');
  for (const part of ['package.json', 'schema', 'src', 'style', '../clients/typescript/src']) {
    for (const path of filesOf(join(here, part))) {
      if (path.endsWith('schema.ts')) {
        continue; // generated from the API; test_built.py checks its routes, the only part that is built in
      }
      hash.update(relative(here, path) + '\0');
      hash.update(readFileSync(path));
      hash.update('\0');
    }
  }
  return hash.digest('hex');
}

const core = run('python3', '-c', 'import jupyterlab, os; print(os.path.join(os.path.dirname(jupyterlab.__file__), "staging"))').trim();
rmSync(join(here, 'lib'), { recursive: true, force: true });
run('node', 'node_modules/typescript/bin/tsc', '-p', 'tsconfig.json');
mkdirSync(target, { recursive: true });
run('node', 'builder/node_modules/@jupyterlab/builder/lib/build-labextension.js', '--core-path', core, here);
for (const path of [...filesOf(target)]) {
  if (path.endsWith('.LICENSE.txt') || path.endsWith('third-party-licenses.json')) {
    rmSync(path);
  }
}
const file = join(target, 'package.json');
if (!existsSync(file)) {
  throw new Error('nothing was built');
}
const data = JSON.parse(readFileSync(file, 'utf8'));
data.jupyterlab._sources = hashSources();
writeFileSync(file, JSON.stringify(data, null, 2) + '\n');
console.log(`built ${[...filesOf(target)].length} files, ${[...filesOf(target)].reduce((sum, path) => sum + statSync(path).size, 0)} bytes`);
