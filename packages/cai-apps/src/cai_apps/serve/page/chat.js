// The page: what is typed goes to the server, and what comes back is shown as text, never as markup.

import { Store } from "./store.js";
import { chat, models } from "./stream.js";

const $ = (id) => document.getElementById(id);
const store = new Store();
const NAMES = { user: "You", assistant: "Model", error: "Error" };
let conversation = null;
let going = null;

function element(tag, text = "", options = {}) {
  return Object.assign(document.createElement(tag), { textContent: text }, options);
}

function say(text, isWrong = false) {
  $("status").textContent = text;
  $("status").classList.toggle("wrong", isWrong);
}

// --- messages

function show(message) {
  const article = element("article", "", { className: message.role });
  const body = element("p", message.content);
  article.append(element("h3", NAMES[message.role] ?? message.role), body);
  $("messages").append(article);
  return article;
}

function showAll() {
  for (const old of $("messages").querySelectorAll("article")) old.remove();
  const messages = conversation?.messages ?? [];
  messages.forEach(show);
  $("empty").hidden = messages.length > 0;
  $("messages").scrollTop = $("messages").scrollHeight;
}

// --- history

function showHistory() {
  $("conversations").replaceChildren(
    ...store.conversations.map((each) => {
      const title = each.messages[0]?.content.slice(0, 80) || "Empty";
      const open = element("button", title, { type: "button", onclick: () => select(each) });
      open.setAttribute("aria-current", String(each === conversation));
      const remove = element("button", "×", { type: "button", title: `Delete: ${title}` });
      remove.setAttribute("aria-label", `Delete conversation: ${title}`);
      remove.onclick = () => {
        if (each === conversation) select(null);
        store.remove(each.id);
        showHistory();
        $("new").focus();
      };
      const entry = element("li");
      entry.append(open, remove);
      return entry;
    }),
  );
  $("keeping").textContent = store.keeping;
  $("forget").disabled = store.conversations.length === 0;
}

function select(other) {
  going?.abort();
  conversation = other;
  openHistory(false);
  showAll();
  showHistory();
  say("");
  $("question").focus();
}

function openHistory(isOpen) {
  $("history").classList.toggle("open", isOpen);
  $("list-button").setAttribute("aria-expanded", String(isOpen));
  if (isOpen) $("new").focus();
}

// --- answers

function requestBody(messages) {
  const { system, temperature, top_p, max_tokens, seed } = store.settings;
  const before = system.trim() ? [{ role: "system", content: system }] : [];
  const said = messages.filter((each) => each.role !== "error" && (each.role !== "assistant" || each.content.trim()));
  const body = { model: $("model").value, messages: [...before, ...said], max_tokens: Number(max_tokens) };
  if (temperature !== "") body.temperature = Number(temperature);
  if (top_p !== "") body.top_p = Number(top_p);
  if (seed !== "") body.seed = Number(seed);
  return body;
}

async function ask(question) {
  conversation ??= store.add();
  const mine = conversation;
  mine.messages.push({ role: "user", content: question });
  const body = requestBody(mine.messages);
  const answer = { role: "assistant", content: "" };
  mine.messages.push(answer);
  showAll();
  showHistory();
  const article = $("messages").lastElementChild;
  article.classList.add("going");
  const stop = new AbortController();
  going = stop;
  setGoing(true);
  say("The model is writing.");
  try {
    const reason = await chat(body, stop.signal, (text) => {
      answer.content += text;
      addText(article, text);
    });
    say(reason === "length" ? "The answer is at its length. Settings has a larger one." : "");
  } catch (error) {
    if (stop.signal.aborted) {
      say("Stopped.");
    } else {
      const fault = { role: "error", content: String(error.message ?? error) };
      if (!answer.content) mine.messages.pop();
      mine.messages.push(fault);
      say("No answer: see the message above.", true);
      if (mine === conversation) showAll();
    }
  } finally {
    article.classList.remove("going");
    if (going === stop) {
      going = null;
      setGoing(false);
    }
    if (!store.save()) say("This browser has no room to keep the conversation.", true);
    showHistory();
  }
}

function addText(article, text) {
  const box = $("messages");
  const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  article.querySelector("p").append(document.createTextNode(text));
  if (isAtEnd) box.scrollTop = box.scrollHeight;
}

function setGoing(isGoing) {
  const hadFocus = document.activeElement === $("stop");
  $("send").hidden = isGoing;
  $("stop").hidden = !isGoing;
  if (hadFocus && !isGoing) $("question").focus();
}

// --- controls

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || going) return;
  $("question").value = "";
  ask(question);
});
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || $("settings").open) return;
  if ($("history").classList.contains("open")) {
    openHistory(false);
    $("list-button").focus();
  } else {
    going?.abort();
  }
});
$("stop").onclick = () => going?.abort();
$("new").onclick = () => select(null);
$("forget").onclick = () => {
  if (!confirm("Delete all conversations from this browser?")) return;
  store.clear();
  select(null);
};
$("list-button").onclick = () => openHistory(!$("history").classList.contains("open"));
$("settings-button").onclick = () => $("settings").showModal();
$("model").onchange = () => store.set("model", $("model").value);
for (const name of ["system", "temperature", "top_p", "max_tokens", "seed"]) {
  $(name).value = store.settings[name];
  $(name).onchange = () => {
    if ($(name).checkValidity()) store.set(name, $(name).value);
    else $(name).value = store.settings[name];
  };
}
$("keeps").checked = store.settings.keeps;
$("keeps").onchange = () => {
  store.set("keeps", $("keeps").checked);
  showHistory();
};

// --- light and dark

const darkness = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (store.settings.theme ? store.settings.theme === "dark" : darkness.matches);

function showTheme() {
  if (store.settings.theme) document.documentElement.dataset.theme = store.settings.theme;
  $("theme").textContent = isDark() ? "Light" : "Dark";
}
$("theme").onclick = () => {
  store.set("theme", isDark() ? "light" : "dark");
  showTheme();
};
darkness.onchange = showTheme;

// --- start

showTheme();
showAll();
showHistory();
try {
  const all = await models();
  $("model").replaceChildren(...all.map((each) => element("option", each.id, { value: each.id })));
  if (all.some((each) => each.id === store.settings.model)) $("model").value = store.settings.model;
  if (!all.some((each) => each.has_chat)) say("This model has no chat template: it cannot chat.", true);
} catch (error) {
  say(`The server does not say which models it has: ${error.message}`, true);
}
