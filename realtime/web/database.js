// Databases of this page in this browser (IndexedDB). Others may have written to them: extensions, other pages of the same
// address, older versions.

// A database with these stores, `{name: keyPath}`. One of another shape is made anew. Raises where the browser keeps nothing
// for this page, and for a database of a newer page.
export async function openDatabase(name, stores) {
  const database = await open(name, stores);
  if (hasShape(database, stores)) return database;
  database.close();
  await answer(indexedDB.deleteDatabase(name));
  return open(name, stores);
}

function open(name, stores) {
  const request = indexedDB.open(name, 1);
  request.onupgradeneeded = () => {
    for (const [store, keyPath] of Object.entries(stores)) request.result.createObjectStore(store, { keyPath });
  };
  return answer(request).then((database) => {
    // Another window with a newer page wants to change the database: it goes first.
    database.onversionchange = () => database.close();
    return database;
  });
}

function hasShape(database, stores) {
  const names = Object.keys(stores);
  if (!names.every((name) => database.objectStoreNames.contains(name))) return false;
  const transaction = database.transaction(names);
  return names.every((name) => String(transaction.objectStore(name).keyPath) === String(stores[name]));
}

// What `mended(record)` makes of all records of the first of these stores, or of a range of it. Those of which it makes
// nothing are deleted from all of them, and `onUnreadable` is called.
export async function readAll(database, stores, mended, { range = null, onUnreadable = () => {} } = {}) {
  const store = database.transaction(stores[0]).objectStore(stores[0]);
  const [keys, records] = await Promise.all([answer(store.getAllKeys(range)), answer(store.getAll(range))]);
  const made = records.map((record) => mended(record));
  const unreadable = keys.filter((_, n) => !made[n]);
  if (unreadable.length) {
    const transaction = database.transaction(stores, "readwrite");
    for (const key of unreadable) for (const name of stores) transaction.objectStore(name).delete(key);
    await done(transaction);
    onUnreadable();
  }
  return made.filter(Boolean);
}

export function answer(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new DOMException("in use by an older page", "InvalidStateError"));
  });
}

export function done(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error);
  });
}

// Whether this can be a number of seconds, or the milliseconds of a date.
export function isTime(value) {
  return Number.isFinite(value) && value >= 0 && value < 8e15;
}
