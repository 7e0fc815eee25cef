-- What was proven landed, so that it need not be proven at each start: by page of a journal's sequence numbers how many tasks
-- were settled, and the sum of their ids' hashes. It lies beside the landings: a database restored from an older state has
-- an older word, and what the broker settled since is asked for.
create table fabric.proven (
    journal_id  text not null,
    page        bigint not null,
    tasks       bigint not null,
    mark        bigint not null,
    primary key (journal_id, page)
);

-- The landings that it rests on: all transactions before `below` had ended, so their landings are what they were for ever.
-- Where they are not (a table restored by itself, rows deleted), nothing counts as proven.
create table fabric.proven_by (
    journal_id  text primary key,
    below       xid8 not null,
    landings    bigint not null,
    mark        numeric not null,
    given_up    bigint not null
);

create function fabric.landings_below(bound xid8, out landings bigint, out mark numeric)
language sql stable
as $$
    select count(*), coalesce(sum(hashtextextended(xid::text || ' ' || function || ' ' || rows::text, 0)), 0)
    from fabric.acks where xid < bound
$$;
