// Opens and reads the page's IndexedDB databases.
//
// Their content is not trusted: extensions, other pages of the same origin and older versions of this page may have
// written it.

// Opens the database with these object stores, `{name: keyPath}`. A database with other stores is deleted and created
// again. Throws if the browser gives this page no storage, and if a newer version of the page has upgraded the
// database.
export async function openDatabase(name, stores) {
  const database = await open(name, stores);
  if (hasShape(database, stores)) return database;
  database.close();
  await resultOf(indexedDB.deleteDatabase(name));
  return open(name, stores);
}

function open(name, stores) {
  const request = indexedDB.open(name, 1);
  request.onupgradeneeded = () => {
    for (const [store, keyPath] of Object.entries(stores)) request.result.createObjectStore(store, { keyPath });
  };
  return resultOf(request).then((database) => {
    // Another window with a newer version of the page wants to upgrade the database.
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

// Reads all records of the first of these stores, or those in `range`, and returns them as `repair` returns them. A
// record for which `repair` returns null is deleted from all of the stores, and `onUnreadable` is called.
export async function readAll(database, stores, repair, { range = null, onUnreadable = () => {} } = {}) {
  const store = database.transaction(stores[0]).objectStore(stores[0]);
  const [keys, records] = await Promise.all([resultOf(store.getAllKeys(range)), resultOf(store.getAll(range))]);
  const repaired = records.map((record) => repair(record));
  const unreadable = keys.filter((_, n) => !repaired[n]);
  if (unreadable.length) {
    const transaction = database.transaction(stores, "readwrite");
    for (const key of unreadable) for (const name of stores) transaction.objectStore(name).delete(key);
    await committed(transaction);
    onUnreadable();
  }
  return repaired.filter(Boolean);
}

// The result of an IndexedDB request, as a promise.
export function resultOf(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new DOMException("in use by an older page", "InvalidStateError"));
  });
}

// Resolves when the transaction is committed.
export function committed(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error);
  });
}

// Whether a value can be a number of seconds, or a date in milliseconds.
export function isTime(value) {
  return Number.isFinite(value) && value >= 0 && value < 8e15;
}
