// Settings and conversations: in this browser, or, where they are not to be kept, in this page alone.

const SETTINGS = "cai.settings", CONVERSATIONS = "cai.conversations";
const MOST = 200;
const DEFAULTS = { system: "", temperature: 0.7, top_p: 1, max_tokens: 1024, seed: "", theme: "", model: "", keeps: true };

function read(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false; // no room is left, or the browser keeps nothing
  }
}

export class Store {
  constructor() {
    const kept = read(SETTINGS, {});
    this.settings = { ...DEFAULTS, ...(typeof kept === "object" ? kept : {}) };
    const conversations = this.settings.keeps ? read(CONVERSATIONS, []) : [];
    this.conversations = Array.isArray(conversations) ? conversations.filter((each) => Array.isArray(each?.messages)) : [];
  }

  set(name, value) {
    this.settings[name] = value;
    write(SETTINGS, this.settings);
    if (name === "keeps") this.save();
  }

  // Keep the conversations, or forget what was kept of them. False: there is no room.
  save() {
    this.conversations.splice(MOST);
    if (this.settings.keeps) return write(CONVERSATIONS, this.conversations);
    localStorage.removeItem(CONVERSATIONS);
    return true;
  }

  add() {
    const conversation = { id: crypto.randomUUID?.() ?? String(Date.now()), messages: [] };
    this.conversations.unshift(conversation);
    return conversation;
  }

  remove(id) {
    this.conversations = this.conversations.filter((each) => each.id !== id);
    this.save();
  }

  clear() {
    this.conversations = [];
    this.save();
  }

  // What is kept, and where, in words.
  get keeping() {
    const count = this.conversations.length;
    const words = count === 1 ? "1 conversation" : `${count} conversations`;
    return this.settings.keeps
      ? `${words}, kept in this browser until deleted. The server keeps none.`
      : `${words}, gone when this page is closed. The server keeps none.`;
  }
}
