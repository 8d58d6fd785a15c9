// The texts of the viewers' page, in the languages that it has.

const TEXTS = {
  en: {
    connecting: "Connecting", waiting: "Nothing is being said yet", live: "Live", over: "The session has ended",
    lost: "Connection lost; trying again", invalid: "This link is not valid any more", full: "There is no room for more viewers; trying again",
    pause: "Pause", resume: "Continue", follow: "To the newest words", smaller: "Smaller type", larger: "Larger type", captions: "Captions",
  },
  de: {
    connecting: "Verbinden", waiting: "Noch spricht niemand", live: "Live", over: "Die Sitzung ist beendet",
    lost: "Verbindung verloren; neuer Versuch", invalid: "Dieser Link gilt nicht mehr", full: "Kein Platz für weitere Zuschauer; neuer Versuch",
    pause: "Anhalten", resume: "Weiter", follow: "Zu den neuesten Worten", smaller: "Kleinere Schrift", larger: "Größere Schrift", captions: "Untertitel",
  },
  es: {
    connecting: "Conectando", waiting: "Todavía no habla nadie", live: "En directo", over: "La sesión ha terminado",
    lost: "Conexión perdida; se vuelve a intentar", invalid: "Este enlace ya no es válido", full: "No hay sitio para más espectadores; se vuelve a intentar",
    pause: "Pausa", resume: "Continuar", follow: "A las últimas palabras", smaller: "Letra más pequeña", larger: "Letra más grande", captions: "Subtítulos",
  },
  fr: {
    connecting: "Connexion", waiting: "Personne ne parle encore", live: "En direct", over: "La session est terminée",
    lost: "Connexion perdue ; nouvel essai", invalid: "Ce lien n'est plus valable", full: "Plus de place pour d'autres spectateurs ; nouvel essai",
    pause: "Pause", resume: "Reprendre", follow: "Aux derniers mots", smaller: "Texte plus petit", larger: "Texte plus grand", captions: "Sous-titres",
  },
  it: {
    connecting: "Connessione", waiting: "Nessuno parla ancora", live: "In diretta", over: "La sessione è terminata",
    lost: "Connessione persa; nuovo tentativo", invalid: "Questo link non è più valido", full: "Non c'è posto per altri spettatori; nuovo tentativo",
    pause: "Pausa", resume: "Continua", follow: "Alle ultime parole", smaller: "Testo più piccolo", larger: "Testo più grande", captions: "Sottotitoli",
  },
  pt: {
    connecting: "A ligar", waiting: "Ainda ninguém fala", live: "Em direto", over: "A sessão terminou",
    lost: "Ligação perdida; nova tentativa", invalid: "Esta ligação já não é válida", full: "Não há lugar para mais espectadores; nova tentativa",
    pause: "Pausa", resume: "Continuar", follow: "Para as últimas palavras", smaller: "Letra menor", larger: "Letra maior", captions: "Legendas",
  },
};

// The first of these languages (BCP 47 tags) that the page has, else English: `{ language, texts }`.
export function textsFor(languages) {
  const codes = languages.map((language) => language.toLowerCase().split("-")[0]);
  const language = codes.find((code) => code in TEXTS) ?? "en";
  return { language, texts: TEXTS[language] };
}
